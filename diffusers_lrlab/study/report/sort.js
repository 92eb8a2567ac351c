"use strict";

/* Headings of tables become buttons that sort the rows: names by the alphabet, all else by the first number. */
const number = (text) => parseFloat(text.replaceAll("−", "-").replaceAll(",", "").replace(/^[<≤>≥ ]+/, ""));

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], rows = [...body.rows];
  const texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent));
  texts.forEach((row, index) => { if (!row[0] && index) row[0] = texts[index - 1][0]; }); // a name is written once
  const headings = [...table.tHead.rows].at(-1).cells;
  [...headings].forEach((heading, column) => {
    if (!heading.textContent) return;
    const isText = texts.every((row) => Number.isNaN(number(row[column]))), button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const falls = heading.ariaSort === "ascending", key = (index) => (isText ? texts[index][column] : number(texts[index][column]));
      [...headings].forEach((other) => { other.ariaSort = null; });
      heading.ariaSort = falls ? "descending" : "ascending";
      const order = rows.map((_, index) => index).filter((index) => isText || !Number.isNaN(key(index)));
      order.sort((a, b) => (falls ? -1 : 1) * (isText ? key(a).localeCompare(key(b)) : key(a) - key(b)));
      for (const index of new Set([...order, ...rows.keys()])) { // rows without a number last
        rows[index].cells[0].textContent = texts[index][0];
        rows[index].className = "";
        body.append(rows[index]);
      }
    });
  });
}
