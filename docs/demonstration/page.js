"use strict";

/* The demonstration: choices, and charts of what the registries computed when the page was built. */

const data = JSON.parse(document.getElementById("data").textContent);
const [first, ...others] = ["currentColor", ...data.colors.filter((color) => color !== "#000000")];
const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

/** A list to choose from; `change` is called after each choice. */
function choose(place, label, options, value, change) {
  const list = make("select", {}, ...options.map((option) => make("option", {value: option}, option)));
  list.value = value;
  list.addEventListener("change", change);
  document.getElementById(place).append(make("label", {}, label, list));
  return list;
}

/** A line, and its points for values under the pointer. */
function line(name, xs, ys, stroke, strokeDasharray, [xName, yName]) {
  const rows = ys.map((y, i) => ({x: xs[i], y, shown: {curve: name, [xName]: xs[i], [yName]: y}}));
  return {rows, mark: Plot.line(rows, {x: "x", y: "y", stroke, strokeWidth: 2, strokeDasharray, clip: true})};
}

const joined = (lines) => ({rows: lines.flatMap(({rows}) => rows), marks: lines.map(({mark}) => mark)});

// --- schedules --------------------------------------------------------------------------------------------------------

const draw = () => schedules.draw();
const {runs, curves, updates} = data.schedules;
const numbers = (index) => [...new Set(Object.keys(runs.cosine).map((key) => key.split(" ")[index]))];
const chosen = {
  schedule: choose("schedule-choices", "schedule", Object.keys(runs), "cosine", draw),
  beside: choose("schedule-choices", "beside", ["none", ...Object.keys(runs)], "none", draw),
  length: choose("schedule-choices", "updates", numbers(0), "200", draw),
  warmup: choose("schedule-choices", "warm-up", numbers(1), "20", draw),
  accumulation: choose("schedule-choices", "accumulation", numbers(2), "4", draw),
  processes: choose("schedule-choices", "processes", numbers(3), "1", draw),
};

/** A panel for each of the schedules: what was asked, dotted where another curve hides it, and what each program runs. */
function schedulePanels() {
  const key = ["length", "warmup", "accumulation", "processes"].map((name) => chosen[name].value).join(" ");
  const told = [], names = [chosen.schedule.value, chosen.beside.value].filter((name) => name !== "none");
  const panels = [...new Set(names)].map((title) => {
    const found = runs[title][key] ?? {}, top = Math.max(...(curves[found[data.asked]] ?? [1]));
    if (!runs[title][key]) told.push(`${title} takes no such warm-up.`);
    const lines = Object.entries(found).map(([program, index]) => {
      const ends = curves[index].at(-1) / top, isAsked = program === data.asked;
      const same = index === found[data.asked];
      const peak = updates[chosen.length.value][curves[index].findIndex((share) => share === Math.max(...curves[index]))];
      const word = isAsked ? "" : same ? ", as asked" : ", not as asked";
      told.push(`${title}, ${program}: peak at update ${peak}, ${percent(ends)} of it at the end${word}.`);
      return line(program, updates[chosen.length.value], curves[index], colorOf(program), isAsked ? null : "6 3", ["update", "share of the peak"]);
    });
    return {title, ...joined(lines), height: 320, marginLeft: 46, x: {label: "update", nice: false}, y: {label: null, domain: [0, top]}};
  });
  document.getElementById("told").replaceChildren(...told.map((text) => make("li", {}, text)));
  return panels;
}

const programs = [...new Set(Object.values(runs).flatMap((each) => Object.values(each).flatMap(Object.keys)))];
const colorOf = (program) => [first, ...others][programs.indexOf(program)];
const legend = () => programs.map((name) => ({name, color: colorOf(name), dashes: name === data.asked ? "" : "6 3"}));

/** Names in their colours. */
function key(place, entries) {
  const names = entries.map(({name, color, dashes}) => {
    const label = make("span", {className: "tick"}, name);
    label.style.borderBottom = `3px ${dashes ? "dashed" : "solid"} ${color}`;
    return label;
  });
  document.getElementById(place).before(make("div", {className: "ticks"}, ...names));
}

key("schedule-chart", legend());
const schedules = new Chart(document.getElementById("schedule-chart"), "schedules", ["y"], [], schedulePanels, legend);

// --- densities --------------------------------------------------------------------------------------------------------

const drawDensities = () => densities.draw();
const noises = Object.keys(data.densities);
const samplers = [...new Set(Object.values(data.densities).flatMap((each) => Object.keys(each.samplers)))];
const moments = ["start of the run", "middle", "end"].map((name, i) => ({name, color: [first, ...others][i], dashes: ["", "6 3", "2 3"][i]}));
const wanted = {
  sampler: choose("density-choices", "sampler", samplers, "logit_normal" in data.densities[noises[0]].samplers ? "logit_normal" : samplers[0], drawDensities),
  axis: choose("density-choices", "over", ["log SNR", "timestep"], "log SNR", drawDensities),
};

/** A panel for each noise process that takes the sampler. */
function densityPanels() {
  const sampler = wanted.sampler.value, over = wanted.axis.value;
  return noises.filter((noise) => sampler in data.densities[noise].samplers).map((title) => {
    const {timesteps, log_snr, per_log_snr, samplers: all} = data.densities[title], isLog = over === "log SNR";
    const lines = all[sampler].map((density, i) => line(
      moments[i].name, isLog ? log_snr : timesteps, isLog ? density.map((y, j) => y * per_log_snr[j]) : density,
      moments[i].color, moments[i].dashes || null, [over, "density"],
    ));
    return {title, ...joined(lines), marginLeft: 46, x: {label: over, nice: false}, y: {label: null, zero: true}};
  });
}

key("density-chart", moments);
const densities = new Chart(document.getElementById("density-chart"), "densities", ["y"], [], densityPanels, () => moments);

// --- a study ----------------------------------------------------------------------------------------------------------

function studyPanels() {
  const arms = [...new Set(data.study.runs.map(({arm}) => arm))];
  return d3.groups(data.study.runs, ({dataset}) => dataset).map(([title, found]) => ({
    title, marginLeft: 54, marginBottom: 76, height: 290,
    ...joined(arms.map((arm, i) => {
      const own = found.filter((run) => run.arm === arm);
      const rows = own.map(({seed, value}, j) => ({x: i + (j - own.length / 2) / 12, y: value, shown: {"data set": title, arm, seed, [data.study.metric]: value}}));
      return {rows, mark: Plot.dot(rows, {x: "x", y: "y", r: 3.5, fill: [first, ...others][i % 6], clip: true})};
    })),
    x: {domain: [-0.6, arms.length - 0.4], ticks: d3.range(arms.length), tickFormat: (i) => arms[i], tickRotate: -40, label: null, grid: false, nice: false},
    y: {label: null},
  }));
}

new Chart(document.getElementById("study-chart"), "study", ["y"], ["y"], studyPanels);
