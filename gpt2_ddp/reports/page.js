// The values under the mouse, the age of the newest row, and buttons that copy tables. The page is complete without it.
"use strict";

const NEAR = 0.04; // of the width: how far a curve's point may be from the cursor
const MOST = 12; // curves in a list of values

function number(value) {
  if (value === null) return "not finite";
  if (Math.abs(value) >= 1000 && Math.abs(value) < 1e15) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(5)));
}

function nearest(sorted, x) {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
}

function add(parent, name, tag = "div") {
  const element = document.createElement(tag);
  element.className = name;
  parent.append(element);
  return element;
}

function follow(figure) {
  const { axis, x, y, log, log_x, curves } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const frame = plot.querySelector("svg");
  const along = (value) => (log_x ? Math.log(value / x[0]) / Math.log(x[1] / x[0]) : (value - x[0]) / (x[1] - x[0]));
  const up = (value) => (log ? Math.log(value / y[0]) / Math.log(y[1] / y[0]) : (value - y[0]) / (y[1] - y[0]));
  let drawn = [];

  function clear() {
    for (const element of drawn) element.remove();
    drawn = [];
  }

  function show(event) {
    clear();
    const box = frame.getBoundingClientRect();
    const outer = plot.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const at = log_x ? x[0] * (x[1] / x[0]) ** share : x[0] + (x[1] - x[0]) * share;
    const all = curves.filter((curve) => curve.x.length).map((curve) => {
      const i = nearest(curve.x, at);
      return { curve, x: curve.x[i], value: curve.y[i], gap: Math.abs(along(curve.x[i]) - share) };
    });
    if (!all.length) return;
    const first = all.reduce((a, b) => (b.gap < a.gap ? b : a));
    const left = (value) => box.left - outer.left + box.width * along(value);
    const top = (value) => box.top - outer.top + box.height * (1 - up(value));
    const mouse = event.clientY - outer.top;
    const found = all.filter((point) => Math.abs(along(point.x) - along(first.x)) <= NEAR);
    for (const point of found) point.far = point.value === null ? Infinity : Math.abs(top(point.value) - mouse);
    found.sort((a, b) => a.far - b.far);

    const cursor = add(plot, "cursor");
    cursor.style.cssText = `left:${left(first.x)}px;top:${box.top - outer.top}px;height:${box.height}px`;
    const tip = add(plot, "tip");
    add(tip, "").textContent = `${axis} ${number(first.x)}`;
    drawn.push(cursor, tip);
    for (const [place, point] of found.slice(0, MOST).entries()) {
      const line = add(tip, place === 0 && found.length > 2 ? "near" : "");
      add(line, "", "i").style.background = point.curve.color;
      const where = point.x === first.x ? "" : ` (${axis} ${number(point.x)})`;
      line.append(`${point.curve.label} ${number(point.value)}${where}`.trim());
      if (point.value === null || up(point.value) < 0 || up(point.value) > 1) continue;
      const dot = add(plot, "dot");
      dot.style.cssText = `left:${left(point.x)}px;top:${top(point.value)}px;background:${point.curve.color}`;
      drawn.push(dot);
    }
    if (found.length > MOST) add(tip, "").textContent = `and ${found.length - MOST} more`;
    const right = left(first.x) + 12;
    const fits = right + tip.offsetWidth <= outer.width;
    tip.style.left = `${fits ? right : Math.max(left(first.x) - 12 - tip.offsetWidth, 0)}px`;
    tip.style.top = `${Math.max(Math.min(mouse - tip.offsetHeight / 2, outer.height - tip.offsetHeight), 0)}px`;
  }

  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", clear);
}

function age(seconds) {
  if (seconds < 90) return `${Math.max(Math.round(seconds), 0)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

function showAges() {
  for (const time of document.querySelectorAll("time")) {
    const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
    time.title = time.title || time.textContent;
    time.textContent = age(seconds);
    time.classList.toggle("bad", seconds > 600);
  }
}

async function copy(pre, button) {
  getSelection().selectAllChildren(pre);
  try {
    await navigator.clipboard.writeText(pre.textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl-C";
  }
}

document.querySelectorAll("figure.chart").forEach(follow);
for (const pre of document.querySelectorAll("pre.copy")) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.addEventListener("click", () => copy(pre, button));
  pre.before(button);
}
showAges();
setInterval(showAges, 1000);
