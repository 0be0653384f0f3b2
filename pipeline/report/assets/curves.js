// Curves of metrics: those of all runs over each other, by step, tokens or hours, smoothed.

const AXES = { step: "optimizer step", tokens: "trained tokens", hours: "hours of training" };
const shown = { axis: "step", smoothing: 0.6, hidden: new Set(), filter: "" };

// An exponential mean, corrected for its beginning: each value has the weight that is left of all before it.
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function tracesOf(run, name, index) {
  const curve = run.curves.drawn[name];
  if (curve === undefined || shown.hidden.has(run.name)) return [];
  const x = run.curves.axes[curve.axis][shown.axis], of = colour(index), label = readable(run.name);
  const few = x.length < 40, smooths = shown.smoothing > 0 && x.length > 8 && !name.startsWith("eval/");
  const line = (y, more) => ({ x, y, type: "scatter", mode: "lines", name: label, hoverinfo: "skip", ...more });
  const traces = [];
  if (curve.low !== null) {
    traces.push(line(curve.low, { line: { width: 0 } }));
    traces.push(line(curve.high, { line: { width: 0 }, fill: "tonexty", fillcolor: faded(of, 0.13) }));
  }
  if (smooths) traces.push(line(curve.mean, { line: { width: 1, color: faded(of, 0.3) } }));
  traces.push(line(smooths ? smoothed(curve.mean, shown.smoothing) : curve.mean, {
    line: { width: 1.7, color: of }, hoverinfo: "all", mode: few ? "lines+markers" : "lines", marker: { size: 4, color: of },
    hovertemplate: "%{y:.5~g}",
  }));
  return traces;
}

function pictureOf(name) {
  const traces = data.runs.flatMap((run, index) => tracesOf(run, name, index));
  const ends = data.runs.filter((run) => run.curves.drawn[name]?.mean.length)
    .map((run) => `${run.name} ends at ${number(run.curves.drawn[name].mean.at(-1))}`);
  return {
    traces, layout: layoutOf(AXES[shown.axis], data.units[name].unit),
    summary: `${name} over ${AXES[shown.axis]}: ${ends.join(", ")}`,
  };
}

function meaningOf(name) {
  const missing = data.runs.reduce((sum, run) => sum + (run.curves.drawn[name]?.not_finite ?? 0), 0);
  const unknown = missing ? `${number(missing)} values are not finite, or beyond 1e100` : null;
  return [data.units[name].meaning, unknown].filter(Boolean).join("; ");
}

function curveOf(name) {
  return chart(name, meaningOf(name), () => pictureOf(name));
}

function showCurves() {
  const groups = Map.groupBy(Object.keys(data.units).filter(isWanted), (name) => data.units[name].group);
  const open = new Set([...contentOf("curves").querySelectorAll("details[open]")].map((each) => each.dataset.group));
  const parts = [...groups].map(([group, names]) => groupOf(group, names, open.has(group) || shown.filter !== ""));
  contentOf("curves").replaceChildren(...(parts.length ? parts : [make("p", { class: "note" }, "No metric has such a name.")]));
}

function isWanted(name) {
  return name.toLowerCase().includes(shown.filter.toLowerCase());
}

function groupOf(group, names, open) {
  const grid = make("div", { class: "grid" });
  const details = make("details", { "data-group": group, open },
    make("summary", {}, readable(group), make("span", { class: "quiet" }, ` ${names.length}`)), grid);
  const fill = () => { if (details.open && !grid.childElementCount) grid.append(...names.map(curveOf)); };
  details.addEventListener("toggle", fill);
  fill();
  return details;
}
