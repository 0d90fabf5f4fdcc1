// The gateway itself: event loop, CPU, memory, retries, and what this page costs.
import { chart } from "./charts.js";
import { bytes, duration, fixed, h, milliseconds, number, percent, tiles } from "./dom.js";

export const gateway = () => {
  const sums = tiles("Loop lag", "CPU", "Memory", "Memory budget", "Retry budget", "Clients", "Background errors", "Log lines dropped", "Up for", "Page, CPU");
  let columns = {};
  const column = (name) => (point) => point[columns[name]];
  const charts = [
    chart("Event loop lag", [{ name: "mean", style: "s1", of: column("lag_ms"), area: true }], { most: 1, shown: milliseconds, note: "above 50 ms the gateway is overloaded" }),
    chart("CPU", [{ name: "of one core", style: "s2", of: column("cpu"), area: true }], { most: 0.1, shown: (value) => percent(value) }),
    chart("Memory", [{ name: "resident", style: "s3", of: column("memory_mb"), area: true }], { most: 50, shown: (value) => `${fixed(value)} MB` }),
    chart("Requests a second", [{ name: "completed", style: "s1", of: column("completed") }, { name: "failed", style: "bad", of: column("failed") }], { most: 1 }),
  ];
  return {
    node: h("div", {}, sums.node, h("div", { className: "charts pairs" }, charts.map((each) => each.node))),
    update: ({ gateway: own, points, columns: names }) => {
      columns = names;
      sums.set(0, milliseconds(own.lag.mean_ms), own.lag.most_ms == null ? "at most over 1 s" : `at most ${milliseconds(own.lag.most_ms)}`);
      sums.set(1, percent(own.cpu, 1), "of one core");
      sums.set(2, bytes(own.memory_bytes), "resident");
      sums.set(3, percent(own.held_bytes / own.held_bytes_limit, 1), `${bytes(own.held_bytes)} of ${bytes(own.held_bytes_limit)} for requests`);
      sums.set(4, number(own.retries_left), `retries left of ${number(own.retries_most)}`);
      sums.set(5, number(own.clients), "connections");
      sums.set(6, number(own.background_errors), "a bug, if not 0");
      sums.set(7, number(own.dropped_lines));
      sums.set(8, duration(own.uptime_seconds), `${own.version} (${own.build})`);
      sums.set(9, milliseconds(own.look_ms), `a message, for ${number(own.watchers)} ${own.watchers === 1 ? "page" : "pages"}`);
      charts.forEach((each) => each.update(points));
    },
    close: () => charts.forEach((each) => each.close()),
  };
};
