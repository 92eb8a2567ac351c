"use strict";

/* The page of a study as one explores it. Without this script, pictures stand where it puts charts; paper has them, too. */

const study = JSON.parse(document.getElementById("study").textContent);
const armOf = new Map(study.arms.map((arm) => [arm.name, arm]));
const off = {arms: new Set(), seeds: new Set()};
let meansAreShown = true;
const charts = [];

const inked = (color) => (color === "#000000" ? "currentColor" : color); // black is the ink's
const colorOf = (arm) => inked(armOf.get(arm).color);
const shownArms = () => [...armOf.keys()].filter((arm) => !off.arms.has(arm));
const legend = () => shownArms().map((name) => ({name, color: colorOf(name), dashes: armOf.get(name).dashes}));
const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const isDrawn = (log, axis, value) => value != null && (!log.has(axis) || value > 0);

/** A row of a chart for each of the study's arms that is shown, with its place on an axis of names. */
function places(rows) {
  const arms = shownArms().filter((arm) => rows.some((row) => row.arm === arm));
  const most = Math.max(4, ...arms.map((arm) => Math.min(arm.length, 18)));
  const ticks = {domain: [-0.6, arms.length - 0.4], ticks: d3.range(arms.length), tickFormat: (i) => short(arms[i] ?? "", 18)};
  return {arms, margin: 14 + 6.5 * most, axis: {...ticks, nice: false, label: null}};
}

/** Differences from the baseline, with their intervals. */
function differences({label, better, rows}) {
  const sides = {smaller: ["better", "worse"], larger: ["worse", "better"], neither: ["lower", "higher"]}[better];
  return () => datasetsOf(rows).map((title) => {
    const here = rows.filter(({arm, dataset, diff}) => dataset === title && !off.arms.has(arm) && diff != null);
    const {arms, margin, axis} = places(here);
    const points = here.map((row) => ({...row, x: row.diff, y: arms.indexOf(row.arm), shown: {
      "data set": title, arm: row.arm, metric: label, difference: row.diff, low: row.low, high: row.high, "adjusted p": row.p,
      verdict: row.word ?? "no test",
    }}));
    const lines = points.filter(({low}) => low != null);
    return {
      title, rows: points, marginLeft: margin, marginBottom: 40, height: 96 + 24 * arms.length,
      x: {label: `← ${sides[0]}   difference   ${sides[1]} →`, ticks: 4, labelAnchor: "center"},
      y: {...axis, domain: [...axis.domain].reverse(), grid: false},
      marks: [
        Plot.ruleX([0], {clip: true}),
        Plot.ruleY(lines, {y: "y", x1: "low", x2: "high", stroke: "color", strokeWidth: 2.5, clip: true}),
        Plot.dot(points, {x: "x", y: "y", fill: "color", r: 4.5, clip: true}),
      ],
    };
  });
}

/** The final value of every run. */
function seeds({label, metric, rows}) {
  return (log) => datasetsOf(rows).map((title) => {
    const here = rows.filter(({arm, dataset}) => dataset === title && !off.arms.has(arm));
    const {arms, margin, axis} = places(here), all = d3.group(study.runs, (run) => run.arm);
    const points = here.flatMap(({arm}) => {
      const runs = all.get(arm).filter((run) => run.dataset === title && run.values[metric] != null);
      return runs.map((run, index) => ({
        arm, run, x: arms.indexOf(arm) + (runs.length > 1 ? index / (runs.length - 1) / 2 - 0.25 : 0), y: run.values[metric],
        open: () => showRun(run), shown: {"data set": title, arm, seed: run.seed, [label]: run.values[metric]},
      }));
    }).filter(({run, y}) => !off.seeds.has(run.seed) && isDrawn(log, "y", y));
    const means = here.filter(({mean}) => meansAreShown && isDrawn(log, "y", mean)).map((row) => ({...row, x: arms.indexOf(row.arm)}));
    const bars = means.filter(({low}) => isDrawn(log, "y", low)), stroke = ({arm}) => colorOf(arm);
    const floor = here.find((row) => row.floor != null)?.floor, [low, high] = d3.extent(points, ({y}) => y);
    // Only among the values is it a line: far from them, it would press them into a corner.
    const isNear = floor >= low - (high - low) / 2 && floor <= high + (high - low) / 2;
    return {
      title, rows: points, marginBottom: 12 + 0.75 * margin, marginLeft: 54, height: 230 + 0.75 * margin,
      x: {...axis, tickRotate: -40, grid: false}, y: {label: null, ticks: 6},
      marks: [
        Plot.ruleY(isNear && isDrawn(log, "y", floor) ? [floor] : [], {strokeDasharray: "2 3", clip: true}),
        Plot.text(floor == null ? [] : [`held-out data: ${digits(floor)}`], {frameAnchor: "top-right", dy: -16, fontSize: 11}),
        Plot.dot(points, {x: "x", y: "y", fill: stroke, r: 3.2, fillOpacity: 0.7, clip: true}),
        Plot.ruleY(means, {x1: ({x}) => x - 0.33, x2: ({x}) => x + 0.33, y: "mean", stroke, strokeWidth: 2, clip: true}),
        Plot.ruleX(bars, {x: "x", y1: "low", y2: "high", stroke, strokeWidth: 1.5, clip: true}),
      ],
    };
  });
}

/** A quantity over the updates: means with their bands, and single seeds. */
function curves({label, lines}) {
  return (log) => datasetsOf(lines).map((title) => {
    const here = lines.filter(({arm, dataset}) => dataset === title && !off.arms.has(arm));
    const rows = [], marks = [];
    const isRow = ({x, y}) => isDrawn(log, "x", x) && isDrawn(log, "y", y);
    for (const {arm, updates, mean, low, high, seed_updates, seeds: single} of here) {
      const stroke = colorOf(arm), about = {"data set": title, arm};
      for (const [seed, values] of Object.entries(single)) {
        if (off.seeds.has(Number(seed))) continue;
        const run = study.runs.find((each) => each.arm === arm && each.dataset === title && each.seed === Number(seed));
        const points = values.map((y, i) => ({
          x: seed_updates[i], y, arm, open: () => showRun(run), shown: {...about, seed: Number(seed), update: seed_updates[i], [label]: y},
        })).filter(isRow);
        marks.push(Plot.line(points, {x: "x", y: "y", stroke, strokeWidth: 0.6, strokeOpacity: 0.5, clip: true}));
        rows.push(...points);
      }
      if (!meansAreShown) continue;
      const points = mean.map((y, i) => ({
        x: updates[i], y, low: low[i], high: high[i], arm,
        shown: {...about, seed: "mean", update: updates[i], [label]: y, low: low[i], high: high[i]},
      })).filter(isRow);
      const band = points.filter((point) => isDrawn(log, "y", point.low));
      const strokeDasharray = armOf.get(arm).dashes || null;
      marks.push(Plot.areaY(band, {x: "x", y1: "low", y2: "high", fill: stroke, fillOpacity: 0.15, clip: true}));
      marks.push(Plot.line(points, {x: "x", y: "y", stroke, strokeWidth: 1.8, strokeDasharray, clip: true}));
      rows.push(...points);
    }
    return {title, rows, marks, marginLeft: 54, x: {label: "update", ticks: 5, nice: false}, y: {label: null, ticks: 6}};
  });
}

const datasetsOf = (rows) => study.datasets.filter((name) => rows.some(({dataset}) => dataset === name));

/** A run: its values, its curves beside the others', what it drew, and its options. */
function showRun(run) {
  const entry = ([key, value]) => [make("dt", {}, key), make("dd", {}, digits(value))];
  const list = (values) => make("dl", {}, ...Object.entries(values).flatMap(entry));
  const values = Object.entries(run.values).map(([metric, value]) => [study.labels[metric] ?? metric, value]);
  const dialog = make("dialog", {ariaLabel: "A run"}), pictures = make("div", {className: "panels"});
  dialog.append(
    make("form", {method: "dialog"}, make("button", {}, "close")),
    make("h2", {}, `${run.arm}, ${run.dataset}, seed ${run.seed}`), make("p", {className: "note"}, `runs/${run.id}.json`),
    list({"peak learning rate": run.rate, ...Object.fromEntries(values)}), pictures,
    make("h3", {}, "Options in which it differs from other runs"), list(run.config),
  );
  for (const {label, lines, log} of study.charts.filter(({what}) => what === "curves")) {
    const line = lines.find(({arm, dataset}) => arm === run.arm && dataset === run.dataset);
    if (line) pictures.append(curveOfRun(line, line.seeds[run.seed], label, log, run));
  }
  if (run.points) pictures.append(Plot.plot({
    width: 300, height: 300, style: {fontSize: "11px"}, aspectRatio: 1, ariaLabel: "Samples", x: {label: "samples"}, y: {label: null},
    marks: [Plot.dot(run.points, {r: 1.2, fill: colorOf(run.arm)})],
  }));
  if (run.png) pictures.append(make("img", {className: "photo", alt: "Samples of this run", src: `data:image/png;base64,${run.png}`}));
  if (!run.points && !run.png) pictures.append(make("p", {className: "note"}, "Its samples, if there are any, are in its file."));
  pictures.querySelectorAll("svg").forEach(asPicture);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** The curve of one seed; the mean of its arm in grey, alone where seeds do not differ or are too many. */
function curveOfRun({updates, mean, seed_updates}, own, label, log, run) {
  const points = (xs, ys) => ys.map((y, i) => [xs[i], y]);
  const type = log && Math.min(...mean, ...(own ?? [])) > 0 ? "log" : "linear";
  return Plot.plot({
    width: 300, height: 220, style: {fontSize: "11px"}, marginLeft: 54, ariaLabel: label, x: {label: "update", ticks: 4},
    y: {label: own ? label : `${label}, mean`, type, ticks: 5, tickFormat: digits},
    marks: [
      Plot.line(points(updates, mean), {stroke: "gray"}),
      Plot.line(own ? points(seed_updates, own) : [], {stroke: colorOf(run.arm), strokeWidth: 2}),
    ],
  });
}

/** Boxes for arms and seeds, and a list of all runs. */
function controls() {
  const redraw = (set, name) => (on) => { on ? set.delete(name) : set.add(name); charts.forEach((chart) => chart.draw()); };
  const arms = [...armOf.keys()].map((arm) => {
    const label = tick(arm, true, redraw(off.arms, arm));
    label.style.borderBottom = `3px ${armOf.get(arm).dashes ? "dashed" : "solid"} ${colorOf(arm)}`;
    return label;
  });
  const means = tick("mean", true, (on) => { meansAreShown = on; charts.forEach((chart) => chart.draw()); });
  const numbers = study.seeds.map((seed) => tick(`seed ${seed}`, true, redraw(off.seeds, seed)));
  const names = study.runs.map((run, index) => make("option", {value: index}, `${run.arm}, ${run.dataset}, seed ${run.seed}`));
  const runs = make("select", {ariaLabel: "Show a run"}, make("option", {value: ""}, "show a run …"), ...names);
  runs.addEventListener("change", () => { if (runs.value) showRun(study.runs[runs.value]); runs.value = ""; });
  const box = make("details", {className: "live controls", open: innerWidth > 800});
  box.append(
    make("summary", {}, "Arms, seeds, runs"), make("div", {className: "ticks"}, ...arms),
    make("div", {className: "ticks"}, means, ...numbers, runs),
    make("p", {className: "note"}, "Point at a chart for values, click a run's point for the run, draw a rectangle to zoom."),
  );
  document.querySelector("nav").after(box);
}

controls();
const kinds = {differences, seeds, curves};
for (const chart of study.charts) {
  const picture = document.querySelector(`[data-file="${CSS.escape(chart.file)}"]`), place = make("div", {className: "live"});
  picture.classList.add("printed");
  picture.before(place);
  const axes = {differences: [], seeds: ["y"], curves: ["x", "y"]}[chart.what];
  charts.push(new Chart(place, chart.file.replace(/\.png$/, ""), axes, chart.log ? ["y"] : [], kinds[chart.what](chart), legend));
}
document.querySelectorAll("table").forEach(makeSortable);
// The list of arms has the colours of the charts; those of pictures are turned in the dark.
for (const line of document.querySelectorAll("dt svg line")) {
  Object.assign(line.ownerSVGElement.style, {filter: "none", color: "var(--ink)"});
  line.setAttribute("stroke", inked(line.getAttribute("stroke")));
}
