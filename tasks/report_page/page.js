"use strict";
// Draws the charts and lanes of a run from the JSON in this page. Everything shown is also in the page's tables.
const data = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg";
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;

function add(parent, tag, attributes, text) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
}

const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));
const FORMATS = {
  plain: v => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6)) ? v.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e") : trimmed(v, 4),
  count: v => v >= 1e9 ? trimmed(v / 1e9, 3) + "B" : v >= 1e6 ? trimmed(v / 1e6, 3) + "M" : v >= 1e3 ? trimmed(v / 1e3, 3) + "k" : trimmed(v, 3),
  bytes: v => v >= 2 ** 40 ? trimmed(v / 2 ** 40, 3) + " TiB" : v >= 2 ** 30 ? trimmed(v / 2 ** 30, 3) + " GiB"
    : v >= 2 ** 20 ? trimmed(v / 2 ** 20, 3) + " MiB" : v >= 1024 ? trimmed(v / 1024, 3) + " KiB" : v + " B",
  seconds: v => v >= 1 || v === 0 ? trimmed(v, 3) + " s" : v >= 1e-3 ? trimmed(v * 1e3, 3) + " ms" : trimmed(v * 1e6, 3) + " µs",
};

function ticks(low, high, count, base = 10) {
  const raw = (high - low) / count || 1;
  const power = base ** Math.floor(Math.log(raw) / Math.log(base));
  const steps = base === 10 ? [1, 2, 2.5, 5, 10] : base === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1];
  const step = power * steps.find(s => power * s >= raw * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n ? n * step : 0);
  return found;
}

// A continuous stretch of points that have a value.
function stretches(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) found.push([]);
    found[found.length - 1].push(i);
  });
  return found;
}

function drawChart(element, chart) {
  const width = element.clientWidth, height = element.clientHeight, xs = data.steps;
  const format = FORMATS[chart.format];
  element.replaceChildren();
  const svg = add(element, "svg", {width, height, role: "img", "aria-label": chart.title + " over steps"});
  const stacked = chart.stacked ? stack(chart.series) : null;
  const values = [...chart.series.flatMap(s => [...s.low, ...s.high]), ...chart.points.map(p => p[1])].filter(v => v !== null);
  let low = values.length ? values.reduce((a, b) => Math.min(a, b)) : 0;
  let high = values.length ? values.reduce((a, b) => Math.max(a, b)) : 1;
  if (stacked) { low = 0; high = stacked.reduce((a, s) => s.top.reduce((b, v) => Math.max(b, v), a), 1e-9); }
  const log = chart.log && low > 0 && high / low > 30;
  if (chart.zero && !log) low = Math.min(0, low);
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  if (!log) { const room = (high - low) * 0.05; high += room; if (low !== 0) low -= room; }
  const left = 58, right = 10, top = 8, bottom = 24;
  const first = Math.min(xs[0] ?? 0, ...chart.points.map(p => p[0]));
  const last = Math.max(xs[xs.length - 1] ?? 1, ...chart.points.map(p => p[0]));
  const X = v => left + (width - left - right) * (last === first ? 0.5 : (v - first) / (last - first));
  const share = v => log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
  const Y = v => height - bottom - (height - top - bottom) * share(v);
  const marks = log ? logTicks(low, high) : ticks(low, high, height / 50, chart.format === "bytes" ? 1024 : 10);
  for (const mark of marks) {
    add(svg, "line", {x1: left, x2: width - right, y1: Y(mark), y2: Y(mark), class: "gridline"});
    add(svg, "text", {x: left - 8, y: Y(mark) + 4, "text-anchor": "end"}, format(mark));
  }
  for (const mark of ticks(first, last, Math.max(2, width / 110)).filter(Number.isInteger))
    add(svg, "text", {x: X(mark), y: height - 6, "text-anchor": X(mark) > width - 30 ? "end" : "middle"}, mark.toLocaleString("en"));
  add(svg, "line", {x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis"});
  if (stacked) for (const s of stacked) {
    const path = s.top.map((v, i) => `${X(xs[i])},${Y(v)}`).concat(s.base.map((v, i) => `${X(xs[i])},${Y(v)}`).reverse());
    add(svg, "polygon", {points: path.join(" "), class: `area f${s.colour}`});
  }
  else for (const s of chart.series) for (const stretch of stretches(s.mean)) {
    if (stretch.some(i => s.high[i] > s.low[i])) {
      const path = stretch.map(i => `${X(xs[i])},${Y(s.high[i])}`).concat(stretch.map(i => `${X(xs[i])},${Y(s.low[i])}`).reverse());
      add(svg, "polygon", {points: path.join(" "), class: `band f${s.colour}`});
    }
    const path = stretch.map((i, n) => `${n ? "L" : "M"}${X(xs[i])} ${Y(s.mean[i])}`).join("") + (stretch.length === 1 ? "h0.01" : "");
    add(svg, "path", {d: path, class: `line s${s.colour} ${s.thin ? "thin" : ""}`});
  }
  if (chart.points.length > 1 && chart.points.length < 400)
    add(svg, "polyline", {points: chart.points.map(p => `${X(p[0])},${Y(p[1])}`).join(" "), class: "line s1 thin"});
  for (const [x, y] of chart.points) add(svg, "circle", {cx: X(x), cy: Y(y), r: 3.5, class: "f1"});
  for (const step of chart.marked) add(svg, "line", {x1: X(step), x2: X(step), y1: height - bottom, y2: height - bottom - 9, class: "sbad"});
  const cursor = add(svg, "line", {y1: top, y2: height - bottom, class: "axis", visibility: "hidden"});
  svg.addEventListener("pointermove", event => {
    if (!xs.length) return;
    const at = event.clientX - svg.getBoundingClientRect().left;
    let nearest = 0;
    xs.forEach((x, i) => { if (Math.abs(X(x) - at) < Math.abs(X(xs[nearest]) - at)) nearest = i; });
    cursor.setAttribute("x1", X(xs[nearest]));
    cursor.setAttribute("x2", X(xs[nearest]));
    cursor.setAttribute("visibility", "visible");
    const lines = chart.series.map(s => {
      const wide = s.high[nearest] > s.low[nearest] ? `  (${format(s.low[nearest])} to ${format(s.high[nearest])})` : "";
      return `${s.name}  ${s.mean[nearest] === null ? "none" : format(s.mean[nearest])}${wide}`;
    });
    const from = nearest ? xs[nearest - 1] + 1 : xs[nearest];
    for (const [x, y] of chart.points) if (x >= from && x <= xs[nearest]) lines.push(`held out  ${format(y)}`);
    showTip(event, [`step ${xs[nearest].toLocaleString("en")}`, ...lines].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}

function stack(series) {
  let base = data.steps.map(() => 0);
  return series.map(s => {
    const top = base.map((v, i) => v + (s.mean[i] ?? 0)), below = base;
    base = top;
    return {colour: s.colour, base: below, top};
  });
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
    for (const m of high / low > 1e3 ? [1] : [1, 3]) if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
  return found;
}

const KINDS = {forward: 0, recompute: 0, head: 6, evaluate: 6, backward: 4, stage: 2, restage: 2, lend_state: 2, fetch_sum: 2, offload: 3, store_sum: 3, return_state: 3, update: 1, update_on_device: 1, load_weights: 2, load_state: 2, store_state: 3, snapshot: 5};
const ROW = 18;

function drawLanes(element, step, zoom) {
  const width = Math.round(element.clientWidth * zoom) - (zoom > 1 ? 0 : 2);
  const X = s => Math.max(0, Math.min(1, s / step.length_s)) * width;
  const keep = element.scrollLeft / element.scrollWidth || 0;
  element.replaceChildren();
  const axis = add(element, "svg", {width, height: 18, "aria-hidden": "true"});
  for (const mark of ticks(0, step.length_s, Math.max(2, width / 100))) {
    add(axis, "line", {x1: X(mark), x2: X(mark), y1: 13, y2: 18, class: "axis"});
    const anchor = X(mark) < 20 ? "start" : X(mark) > width - 25 ? "end" : "middle";
    add(axis, "text", {x: X(mark), y: 11, "text-anchor": anchor}, FORMATS.seconds(mark));
  }
  for (const lane of step.lanes) {
    const box = element.appendChild(document.createElement("div"));
    box.className = "lane";
    box.style.width = width + "px";
    const title = box.appendChild(document.createElement("div"));
    title.appendChild(document.createElement("b")).textContent = lane.title;
    title.appendChild(document.createElement("span")).textContent = `  ${(lane.busy * 100).toFixed(0)} % busy`;
    const svg = add(box, "svg", {width, height: lane.rows.length * ROW, role: "img", "aria-label": `${lane.title}, operations in time`});
    lane.rows.forEach((row, n) => row.forEach(([name, start, end, bytes]) => {
      const x = X(start), wide = Math.max(1.5, X(end) - x - 0.5), kind = KINDS[name.split("[")[0]] ?? 5;
      const rect = add(svg, "rect", {x, y: n * ROW, width: wide, height: ROW - 2, rx: Math.min(2, wide / 3), class: "f" + kind});
      if (wide > name.length * 6.2 + 6) add(svg, "text", {x: x + 4, y: n * ROW + 12, class: "inside"}, name);
      rect.addEventListener("pointermove", event => showTip(event, [
        `${name}  ${lane.title}`, `${FORMATS.seconds(end - start)}, from ${FORMATS.seconds(start)}`,
        ...(bytes ? [`${FORMATS.bytes(bytes)}, ${trimmed(bytes / (end - start) / 1e9, 3)} GB/s`] : []),
      ].join("\n")));
      rect.addEventListener("pointerleave", () => { tip.hidden = true; });
    }));
  }
  element.scrollLeft = keep * element.scrollWidth;
}

function watch(element, draw) {
  let width = element.clientWidth;
  draw();
  addEventListener("resize", () => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    draw();
  });
}

for (const chart of data.charts) {
  const element = document.getElementById(chart.id);
  watch(element, () => drawChart(element, chart));
}
const lanes = document.getElementById("lanes");
if (lanes && data.step) {
  const zoom = document.getElementById("zoom");
  const draw = () => drawLanes(lanes, data.step, 2 ** Number(zoom.value));
  watch(lanes, draw);
  zoom.addEventListener("input", draw);
}
