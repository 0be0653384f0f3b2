// Charts by plotly, drawn when they come into sight, in the colours of the page.

const LIGHT = ["#2156a5", "#c2571a", "#1a7f4b", "#8a3fa0", "#a8323e", "#0f7f8c", "#7a6a00", "#5d6570"];
const DARK = ["#7fb0ff", "#f2a26b", "#57c28b", "#cf97e6", "#f0857c", "#58c4d2", "#d8c757", "#aab3be"];
const darkness = matchMedia("(prefers-color-scheme: dark)");

function colour(index) {
  const colours = darkness.matches ? DARK : LIGHT;
  return colours[index % colours.length];
}

function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function faded(hex, alpha) {
  return `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
}

function layoutOf(xTitle, yTitle, more = {}) {
  const axis = (title) => ({
    title: { text: title, font: { size: 11, color: styled("quiet") }, standoff: 6 },
    gridcolor: styled("grid"), zerolinecolor: styled("line"), linecolor: styled("line"),
    tickfont: { size: 10.5, color: styled("quiet") }, automargin: true, hoverformat: ".5~g",
  });
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: 'system-ui, "DejaVu Sans", sans-serif', size: 11, color: styled("ink") },
    margin: { l: 48, r: 8, t: 6, b: 34 }, showlegend: false, uirevision: "kept", hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { bgcolor: styled("card"), bordercolor: styled("line"), font: { color: styled("ink"), size: 11 } },
    legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: { size: 10.5 } },
    xaxis: { ...axis(xTitle), ...xaxis }, yaxis: { ...axis(yTitle), ...yaxis }, ...rest,
  };
}

const CONFIG = {
  displaylogo: false, responsive: true, doubleClick: "reset", showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "pan2d"],
};

// Each figure has a function that returns its traces and layout; it is called again when anything changes.
const figures = new Map();
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = figures.get(entry.target);
    if (figure === undefined) continue;
    figure.visible = entry.isIntersecting;
    if (figure.visible && figure.stale) draw(entry.target, figure);
  }
}, { rootMargin: "300px" });

function draw(place, figure) {
  const { traces, layout, summary } = figure.picture();
  figure.stale = false;
  place.setAttribute("aria-label", summary);
  Plotly.react(place, traces, layout, CONFIG);
}

function redraw() {
  for (const [place, figure] of figures) {
    figure.stale = true;
    if (!place.isConnected) { seen.unobserve(place); Plotly.purge(place); figures.delete(place); }
    else if (figure.visible) draw(place, figure);
  }
}

function chart(title, meaning, picture, size = "") {
  const place = make("div", { class: `chart ${size}`, role: "img", "aria-label": title });
  figures.set(place, { picture, stale: true, visible: false });
  seen.observe(place);
  return make("figure", {}, make("figcaption", {}, make("b", {}, readable(title)), make("span", {}, meaning)), place);
}

darkness.addEventListener("change", () => { showControls(); redraw(); });
