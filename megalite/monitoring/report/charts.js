// Draws each `.chart` of a page with uPlot, from its data attribute (charts.py). Hovering shows values, dragging zooms, a double click resets
// the zoom, and a click in the legend hides a curve. A live page redraws its charts: the choices of the reader are kept by title.

const COLORS = ["#2a62a8", "#c8691b", "#2f7d4f", "#b03a8c", "#7a4fa3", "#8a7a1f", "#3a8f9c", "#a33a3a"];
const DARK_COLORS = ["#6fa3e0", "#f0a060", "#6cc092", "#e07cc0", "#b597dc", "#d2c060", "#78ccd8", "#e88080"];
const HEAT = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // from low to high, readable without colors
const WHOLE = Array.from({length: 15}, (_, power) => [1, 2, 5].map(each => each * 10 ** power)).flat();
const HEIGHT = 230;
const chosen = new Map();

function shown(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
  return value.toLocaleString("en-US", {maximumFractionDigits: size >= 1000 ? 0 : size >= 10 ? 2 : 4});
}

// Returns the last value of a column at or before a point, because each curve has its own points.
function before(column, index) {
  while (index >= 0 && column[index] == null) index--;
  return index < 0 ? null : column[index];
}

function palette() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, style = getComputedStyle(document.documentElement);
  return {colors: dark ? DARK_COLORS : COLORS, ink: style.getPropertyValue("--ink"), line: style.getPropertyValue("--line"),
          quiet: style.getPropertyValue("--quiet")};
}

function axes(chart, look, rows) {
  const common = {stroke: look.quiet, grid: {stroke: look.line, width: 1}, ticks: {stroke: look.line, width: 1}};
  const values = (_, splits) => splits.map(each => each == null ? "" : shown(each));
  const x = {...common, values, label: chart.over, labelSize: 18, labelFont: "12px system-ui", size: 34};
  const y = {...common, values, label: chart.unit, labelSize: 18, labelFont: "12px system-ui", size: 64};
  if (chart.whole_over) x.incrs = WHOLE;
  if (chart.whole) y.incrs = WHOLE;
  if (rows) {
    y.splits = () => rows.map((_, index) => index).filter(index => index % Math.ceil(rows.length / 8) === 0);
    y.values = (_, splits) => splits.map(index => rows[index].replace("layer ", ""));
    y.grid = {show: false};
  }
  return [x, y];
}

// Draws dashed lines where the segments of a run start.
function marks(chart, look) {
  return plot => {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui`;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const [place, number, color] of chart.marks) {
      const x = plot.valToPos(place, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color == null ? look.quiet : look.colors[color % look.colors.length];
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(String(number), x + 4 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
    }
    ctx.restore();
  };
}

function ofLines(chart, look) {
  const series = [{label: chart.over, value: (_, value) => shown(value)}], bands = [], tables = [];
  for (const line of chart.lines) {
    const color = look.colors[line.color % look.colors.length], column = series.length;
    const table = [line.at, line.values];
    series.push({
      label: line.name, stroke: color, width: 1.5, spanGaps: true, dash: line.dots ? [5, 4] : undefined,
      points: {show: line.dots || line.at.length < 2, size: 6, fill: color},
      value: (plot, value, index, at) => shown(at == null ? before(plot.data[index], plot.data[0].length - 1) : before(plot.data[index], at)),
    });
    if (line.low) {
      table.push(line.high, line.low);
      for (const name of ["highest", "lowest"]) series.push({label: name, class: "hidden", spanGaps: true, points: {show: false}, width: 0});
      bands.push({series: [column + 1, column + 2], fill: color + "38"});
    }
    tables.push(table);
  }
  return {series, bands, data: uPlot.join(tables)};
}

// Stacks the lines: they are drawn from the highest to the lowest, each filled down to zero.
function ofStack(chart, look) {
  const data = uPlot.join(chart.lines.map(line => [line.at, line.values])), sums = [];
  for (const column of data.slice(1)) {
    sums.push(column.map((value, index) => (value ?? 0) + (sums.length ? sums[sums.length - 1][index] : 0)));
  }
  const order = chart.lines.map((_, index) => index).reverse();
  const series = [{label: chart.over, value: (_, value) => shown(value)}, ...order.map(index => {
    const color = look.colors[chart.lines[index].color % look.colors.length];
    const last = data[0].length - 1;
    return {label: chart.lines[index].name, stroke: color, fill: color, width: 1, points: {show: false},
            value: (_plot, _value, _index, at) => shown(data[index + 1][at ?? last])};
  })];
  return {series, data: [data[0], ...order.map(index => sums[index])]};
}

function heatColor(share) {
  const place = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1), low = Math.min(Math.floor(place), HEAT.length - 2);
  return `rgb(${HEAT[low].map((each, channel) => Math.round(each + (HEAT[low + 1][channel] - each) * (place - low))).join()})`;
}

// Draws a row of cells for each line, and shows the value under the pointer next to the legend.
function ofHeat(chart) {
  const data = uPlot.join(chart.lines.map(line => [line.at, line.values])), at = data[0];
  const top = Math.max(2, ...data.slice(1).flat().filter(value => value != null));
  const cells = plot => {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (let index = 0; index < at.length; index++) {
      const left = plot.valToPos(index ? (at[index - 1] + at[index]) / 2 : at[0] - 0.5, "x", true);
      const right = plot.valToPos(index + 1 < at.length ? (at[index] + at[index + 1]) / 2 : at[index] + 0.5, "x", true);
      data.slice(1).forEach((column, row) => {
        if (column[index] == null) return;
        const high = plot.valToPos(row + 0.5, "y", true), low = plot.valToPos(row - 0.5, "y", true);
        ctx.fillStyle = heatColor((column[index] - 1) / (top - 1));
        ctx.fillRect(left, high, right - left + 1, low - high + 1);
      });
    }
    ctx.restore();
  };
  const value = plot => {
    const {idx, top: y} = plot.cursor;
    if (idx == null || y < 0) return `1 (equal) to ${shown(top)}`;
    const row = Math.min(Math.max(Math.round(plot.posToVal(y, "y")), 0), chart.lines.length - 1);
    return `${chart.lines[row].name}: ${shown(data[row + 1][idx])}`;
  };
  const series = [{label: chart.over, value: (_, each) => shown(each)}, {label: "load", stroke: heatColor(0.5), points: {show: false}, paths: () => null, value}];
  return {series, data: [at, at.map(() => null)], cells, range: [-0.5, chart.lines.length - 0.5]};
}

function draw(box) {
  const chart = JSON.parse(box.dataset.chart), look = palette();
  const state = chosen.get(chart.title) ?? {log: chart.log, zoom: null, hidden: new Set()};
  chosen.set(chart.title, state);
  const made = {lines: ofLines, stack: ofStack, heat: ofHeat}[chart.kind](chart, look);
  made.series.forEach((each, index) => { each.show = !state.hidden.has(each.label) || index === 0; });
  const y = {distr: state.log ? 3 : 1};
  if (made.range) y.range = made.range;
  else if (chart.zero && !state.log) y.range = (_, low, high) => [Math.min(low, 0), high > 0 ? 1.05 * high : 1];
  const whole = made.data[0], ends = [whole[0], whole[whole.length - 1]];
  const full = ends[0] === ends[1] ? [ends[0] - 0.5, ends[0] + 0.5] : ends;
  const plot = new uPlot({
    width: box.clientWidth, height: HEIGHT, series: made.series, bands: made.bands, axes: axes(chart, look, made.range && chart.lines.map(each => each.name)),
    scales: {x: {time: false, range: (_, low, high) => state.zoom ?? (low === high || low == null ? full : [low, high])}, y},
    cursor: {sync: {key: chart.over, setSeries: false}, drag: {x: true, y: false}, points: {size: 6}},
    hooks: {
      drawAxes: made.cells ? [made.cells] : [], draw: [marks(chart, look)],
      setSelect: [each => { if (each.select.width > 0) state.zoom = [each.posToVal(each.select.left, "x"), each.posToVal(each.select.left + each.select.width, "x")]; }],
      setSeries: [(each, index) => {
        if (index == null) return;
        const {label, show} = each.series[index];
        state.hidden[show ? "delete" : "add"](label);
      }],
    },
  }, made.data, box.querySelector(".plot"));
  plot.over.addEventListener("dblclick", () => { state.zoom = null; plot.setScale("x", {min: full[0], max: full[1]}); });
  const button = box.querySelector("button");
  if (button) {
    button.setAttribute("aria-pressed", state.log);
    button.onclick = () => { state.log = !state.log; redraw(box); };
  }
  box.plot = plot;
}

function redraw(box) {
  box.plot?.destroy();
  draw(box);
}

function drawAll() {
  document.querySelectorAll(".chart").forEach(redraw);
}

addEventListener("resize", () => {
  document.querySelectorAll(".chart").forEach(box => box.plot?.setSize({width: box.clientWidth, height: HEIGHT}));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
