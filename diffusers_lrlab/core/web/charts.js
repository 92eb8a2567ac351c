"use strict";

/* Charts in panels, with values under the pointer, zoom, logarithmic axes and downloads. Drawn by Observable Plot. */

/** An element with these properties and children. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A box to tick; `change` gets whether it is ticked. */
function tick(label, checked, change) {
  const box = make("input", {type: "checkbox", checked});
  box.addEventListener("change", () => change(box.checked));
  return make("label", {className: "tick"}, box, label);
}

/** A button that does something. */
function button(label, action) {
  const element = make("button", {type: "button"}, label);
  element.addEventListener("click", action);
  return element;
}

function save(name, url) {
  make("a", {download: name, href: url}).click();
}

/** A number as text, to four digits. */
function digits(value) {
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
}

/** All values of the rows, with a little room on either side. */
function logDomain(rows, name) {
  const [low, high] = d3.extent(rows, (row) => row[name]), room = (high / low) ** 0.04;
  return low ? [low / room, high * room] : [0.1, 1];
}

/** Logarithmic axes with plain numbers, which Plot itself leaves out where there is less than a decade. */
function logAxes(log, zoom, rows) {
  return [...log].flatMap((name) => {
    const [low, high] = d3.extent(zoom[name] ?? logDomain(rows, name)), exponents = d3.range(Math.floor(Math.log10(low)), Math.log10(high));
    const steps = high > 1000 * low ? [1] : [1, 2, 5];
    const all = high < 4 * low ? d3.ticks(low, high, 5) : exponents.flatMap((e) => steps.map((step) => step * 10 ** e));
    const ticks = all.filter((value) => value >= low && value <= high);
    const [grid, axis] = {x: [Plot.gridX, Plot.axisX], y: [Plot.gridY, Plot.axisY]}[name];
    return [grid(ticks), axis(ticks, {text: digits})];
  });
}

/** For a screen reader, an SVG is one picture, by its name. */
function asPicture(svg) {
  svg.setAttribute("role", "img");
  svg.querySelectorAll("g[aria-label]").forEach((group) => group.removeAttribute("aria-label"));
  return svg;
}

/**
 * A chart of a panel for each data set in `place`, as `panelsOf(log)` describes them each time that it is drawn:
 * `{title, rows, marks, x, y, marginLeft, marginBottom}`. `marks`, `x` and `y` are as in `Plot.plot`. Each of the `rows` is
 * a point that shows its values under the pointer: `{x, y, shown, open}`, where `shown` are values by name, and `open`, if
 * there is any, is called by a click.
 */
class Chart {
  constructor(place, name, axes, log, panelsOf, legend = () => []) {
    Object.assign(this, {name, panelsOf, legend, log: new Set(log), zooms: new Map(), width: 0});
    this.grid = make("div", {className: "panels"});
    const logs = axes.map((axis) => tick(`log ${axis}`, this.log.has(axis), (on) => {
      on ? this.log.add(axis) : this.log.delete(axis);
      this.whole();
    }));
    const saves = ["CSV", "SVG", "PNG"].map((form) => button(form, () => this.download(form)));
    place.append(make("div", {className: "tools"}, ...logs, button("whole range", () => this.whole()), ...saves), this.grid);
    // Also called when a part that was folded opens.
    new ResizeObserver(() => this.grid.clientWidth !== this.width && this.draw()).observe(this.grid);
  }

  whole() {
    this.zooms.clear();
    this.draw();
  }

  draw() {
    this.width = this.grid.clientWidth;
    if (!this.width) return; // folded
    this.panels = this.panelsOf(this.log);
    const columns = Math.max(1, Math.min(this.panels.length, Math.floor(this.width / 320)));
    this.grid.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    const width = Math.min(Math.floor(this.width / columns) - 8, 760);
    this.grid.replaceChildren(...this.panels.map((panel) => this.panel(panel, width)));
  }

  panel({title, rows, marks, x, y, ...options}, width) {
    const zoom = this.zooms.get(title) ?? {};
    const scale = (name, given) => {
      if (this.log.has(name)) return {label: given.label, type: "log", axis: null, domain: zoom[name] ?? logDomain(rows, name)};
      return {nice: true, grid: true, ...given, ...(zoom[name] ? {domain: zoom[name], nice: false} : {})};
    };
    const text = ({shown}) => Object.entries(shown).map(([key, value]) => `${key}: ${digits(value)}`).join("\n");
    const near = Plot.pointer({x: "x", y: "y", maxRadius: 30});
    const svg = Plot.plot({
      width, height: 270, marginTop: 26, marginRight: 22, ...options, x: scale("x", x), y: scale("y", y), ariaLabel: title,
      style: {background: "transparent", fontSize: "11px", overflow: "hidden"},
      marks: [
        ...logAxes(this.log, zoom, rows),
        ...marks,
        Plot.text([title], {frameAnchor: "top-left", dy: -20, fontWeight: "bold", fontSize: 13}),
        Plot.dot(rows, {...near, r: 5, stroke: "currentColor", strokeWidth: 1.5}),
        Plot.tip(rows, {...near, title: text, fill: "var(--paper)", stroke: "currentColor", fontSize: 12}),
      ],
    });
    asPicture(svg);
    this.addZoom(svg, title);
    // A click is ours: Plot would pin the values.
    svg.addEventListener("pointerdown", (event) => event.stopImmediatePropagation(), {capture: true});
    svg.addEventListener("click", () => svg.value?.open?.());
    return svg;
  }

  /** A rectangle that is drawn with the mouse becomes all that the panel shows. */
  addZoom(svg, title) {
    const [x, y] = [svg.scale("x"), svg.scale("y")];
    const corner = (pick) => [pick(x.range), pick(y.range)];
    const end = ({selection}) => {
      if (!selection) return;
      const [[left, top], [right, bottom]] = selection;
      const ordered = (domain, ends) => (domain[0] > domain.at(-1) ? d3.reverse(d3.sort(ends)) : d3.sort(ends));
      this.zooms.set(title, {
        x: ordered(x.domain, [left, right].map(x.invert)), y: ordered(y.domain, [top, bottom].map(y.invert)),
      });
      this.draw();
    };
    const brush = d3.brush().extent([corner(d3.min), corner(d3.max)]).touchable(false).on("end", end);
    d3.select(svg).insert("g", ":first-child").attr("class", "brush").call(brush);
  }

  download(form) {
    if (form === "CSV") {
      const seen = this.panels.flatMap(({title, rows}) => rows.filter((row) => this.isSeen(title, row)));
      return save(`${this.name}.csv`, `data:text/csv,${encodeURIComponent(d3.csvFormat(seen.map(({shown}) => shown)))}`);
    }
    const svg = this.picture(), url = `data:image/svg+xml,${encodeURIComponent(svg.outerHTML)}`;
    if (form === "SVG") return save(`${this.name}.svg`, url);
    const image = new Image(), [width, height] = ["width", "height"].map((name) => Number(svg.getAttribute(name)));
    image.onload = () => {
      const canvas = make("canvas", {width: 2 * width, height: 2 * height});
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      save(`${this.name}.png`, canvas.toDataURL());
    };
    image.src = url;
  }

  isSeen(title, row) {
    const zoom = this.zooms.get(title) ?? {};
    return ["x", "y"].every((name) => !zoom[name] || (row[name] >= d3.min(zoom[name]) && row[name] <= d3.max(zoom[name])));
  }

  /** All panels as one SVG, where they are on the page, above a legend. */
  picture() {
    const box = this.grid.getBoundingClientRect(), legend = this.legend();
    const [width, height] = [box.width, box.height + 20 * legend.length].map(Math.ceil), style = getComputedStyle(document.body);
    const svg = d3.create("svg").attr("xmlns", "http://www.w3.org/2000/svg").attr("width", width).attr("height", height);
    svg.attr("color", style.color).attr("font-family", "sans-serif").attr("font-size", 12);
    svg.append("rect").attr("width", width).attr("height", height).attr("fill", style.backgroundColor);
    for (const panel of this.grid.children) {
      const place = panel.getBoundingClientRect(), copy = panel.cloneNode(true);
      copy.setAttribute("x", place.x - box.x);
      copy.setAttribute("y", place.y - box.y);
      copy.querySelectorAll(".brush").forEach((part) => part.remove());
      svg.append(() => copy);
    }
    legend.forEach(({name, color, dashes}, index) => {
      const y = box.height + 20 * index + 10;
      svg.append("line").attr("x1", 8).attr("x2", 40).attr("y1", y).attr("y2", y).attr("stroke", color)
        .attr("stroke-width", 3).attr("stroke-dasharray", dashes || null);
      svg.append("text").attr("x", 48).attr("y", y + 4).attr("fill", "currentColor").text(name);
    });
    return svg.node();
  }
}

/** Headings of tables become buttons that sort the rows: names by the alphabet, all else by the first number. */
function makeSortable(table) {
  const headings = [...table.tHead.rows].at(-1).cells, body = table.tBodies[0];
  const rows = [...body.rows], texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent));
  texts.forEach((row, index) => { if (!row[0] && index) row[0] = texts[index - 1][0]; }); // the name is written once
  const number = (text) => parseFloat(text.replaceAll("−", "-").replaceAll(",", "").replace(/^[<≤>≥ ]+/, ""));
  [...headings].forEach((heading, column) => {
    if (!heading.textContent) return;
    const isText = texts.every((row) => Number.isNaN(number(row[column])));
    heading.replaceChildren(button(heading.textContent, () => {
      const falls = heading.ariaSort === "ascending";
      [...headings].forEach((other) => { other.ariaSort = null; });
      heading.ariaSort = falls ? "descending" : "ascending";
      const key = (row) => (isText ? row[column] : number(row[column])), direction = falls ? d3.descending : d3.ascending;
      const order = d3.sort(d3.range(rows.length), (a, b) => direction(key(texts[a]), key(texts[b])));
      order.forEach((index) => { rows[index].cells[0].textContent = texts[index][0]; rows[index].className = ""; });
      body.append(...order.map((index) => rows[index]));
    }));
  });
}
