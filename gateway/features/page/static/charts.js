// Live charts by uPlot: ten minutes of points, values under the pointer, drag to zoom, double click to go back.
import { fixed, h, number } from "./dom.js";

const HEIGHT = 190;
const LEAST_SECONDS = 60;
const dark = matchMedia("(prefers-color-scheme: dark)");

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faint = (hex) => (/^#[0-9a-f]{6}$/i.test(hex) ? `${hex}24` : hex);

/** Without a pointer, the legend has no time. */
const idle = (u) => u.root.classList.toggle("idle", u.cursor.idx == null);

/** `lines`: {name, style, of (index of a column, or a function of a point), area, unit, shown (a formatter)}. */
export const chart = (title, lines, { most, note, shown = number } = {}) => {
  const place = h("div", { className: "plot" });
  const node = h("figure", {}, h("figcaption", {}, title, note && h("small", {}, note)), place);
  let plot = null, data = null, zoomed = false;

  const options = (width) => {
    const soft = variable("--soft"), grid = variable("--line");
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    return {
      width, height: HEIGHT,
      cursor: { sync: { key: "time", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: true }, y: { range: (u, low, high) => [0, Math.max(most || 0, high == null ? 1 : high * 1.08, 1e-9) || 1] } },
      axes: [
        { ...axis, size: 30, space: 70, values: (u, splits) => splits.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB")) },
        { ...axis, size: 72, space: 36, values: (u, splits) => splits.map((value) => shown(value)) },
      ],
      series: [
        { label: "at", value: (u, value) => (value == null ? "–" : new Date(value * 1000).toLocaleTimeString("en-GB")) },
        ...lines.map((line) => {
          const stroke = variable(`--${line.style}`);
          return { label: line.name, stroke, width: 2, fill: line.area ? faint(stroke) : undefined,
            dash: line.dashed ? [5, 4] : undefined, points: { show: false }, value: (u, value) => (value == null ? "–" : shown(value)) };
        }),
      ],
      hooks: { init: [idle], setCursor: [idle], setSelect: [(u) => { zoomed = u.select.width > 0; }] },
    };
  };
  const draw = () => {
    if (plot) plot.destroy();
    plot = new uPlot(options(Math.max(260, place.clientWidth)), data, place);
    plot.over.addEventListener("dblclick", () => { zoomed = false; });
  };
  const sized = new ResizeObserver(() => {
    const width = Math.max(260, place.clientWidth);
    if (plot && width !== plot.width) plot.setSize({ width, height: HEIGHT });
  });
  dark.addEventListener("change", draw);
  return {
    node,
    update: (points) => {
      if (!place.isConnected || !points.length) return;
      const times = points.map((point) => point[0]);
      const last = times.at(-1);
      data = [times, ...lines.map((line) => points.map((point) => (typeof line.of === "function" ? line.of(point) : point[line.of])))];
      if (!plot) { draw(); sized.observe(place); }
      plot.setData(data, false);
      if (!zoomed) plot.setScale("x", { min: Math.min(times[0], last - LEAST_SECONDS), max: last });
      else plot.redraw();
    },
    close: () => { sized.disconnect(); dark.removeEventListener("change", draw); if (plot) plot.destroy(); plot = null; },
  };
};
export const seconds = (value) => `${fixed(value, value < 10 ? 1 : 0)} s`;
