// Shows the values under the pointer. The page is complete without it.
"use strict";
const readout = document.getElementById("readout");

function write(value, percent) {
  if (value === null) return "not finite";
  if (percent) return (100 * value).toFixed(1) + " %";
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

function follow(svg, event) {
  svg.data = svg.data || JSON.parse(svg.dataset.chart);
  const { left, right, low, high, x: label, percent, lines } = svg.data;
  const box = svg.getBoundingClientRect();
  const across = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
  const share = Math.min(1, Math.max(0, (across - left) / (right - left)));
  const wanted = low + share * (high - low);
  const filled = lines.filter((line) => line.points.length);
  const found = filled.map((line) => nearest(line.points, wanted));
  if (!found.length) return;
  const at = found.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a))[0];
  const cursor = svg.querySelector(".cursor");
  const position = left + ((at - low) / (high - low)) * (right - left);
  cursor.setAttribute("x1", position);
  cursor.setAttribute("x2", position);
  cursor.classList.add("shown");
  readout.replaceChildren(`${label} ${write(at, false)}`, ...filled.map((line, index) => {
    const row = document.createElement("div");
    const away = found[index][0] === at ? "" : ` (at ${write(found[index][0], false)})`;
    row.textContent = `${line.name}: ${write(found[index][1], percent)}${away}`;
    return row;
  }));
  readout.hidden = false;
  const leftOf = event.clientX + readout.offsetWidth + 24 > document.documentElement.clientWidth;
  readout.style.left = `${Math.max(4, event.clientX + (leftOf ? -readout.offsetWidth - 14 : 14))}px`;
  readout.style.top = `${Math.max(4, event.clientY - readout.offsetHeight - 10)}px`;
}

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  svg.addEventListener("pointermove", (event) => follow(svg, event));
  svg.addEventListener("pointerleave", () => {
    svg.querySelector(".cursor").classList.remove("shown");
    readout.hidden = true;
  });
}
