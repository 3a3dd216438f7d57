// Charts by uPlot, which the page has loaded. Colours are those of the style sheet.

const REGIMES = ["datacenter", "federated", "hybrid"];
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [1, 2], [12, 4]];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const WHOLE = [1, 2, 5].flatMap((step) => [0, 1, 2, 3, 4, 5, 6].map((power) => step * 10 ** power)).sort((a, b) => a - b);
const plots = new Map();

function figure(value) {
  return value == null ? "–" : String(+value.toPrecision(4));
}

function options(box, series, label) {
  const axis = { stroke: colour("soft"), grid: { stroke: colour("edge"), width: 1 }, ticks: { stroke: colour("edge"), width: 1 }, font: "12px system-ui, sans-serif" };
  return {
    width: Math.max(200, box.clientWidth),
    height: 230,
    cursor: { y: false, drag: { x: true, y: false } },
    scales: { x: { time: false } },
    axes: [label === "round" ? { ...axis, incrs: WHOLE } : axis, { ...axis, size: 56, values: (_, ticks) => ticks.map(figure) }],
    series: [{ label, value: (_, value) => figure(value) }, ...series],
  };
}

function draw(box, data, series, label) {
  plots.get(box)?.plot.destroy();
  const hasMarks = data[0].length > 0;
  box.replaceChildren();
  if (!hasMarks) return;
  plots.set(box, { plot: new uPlot(options(box, series, label), data, box) });
  box.dataset.points = String(data[0].length);
}

// One run: a thin line through all rounds, and marks in the colour of each regime.
function single(run, name, x) {
  const values = run.metrics[name] ?? [];
  const rows = run[x].map((place, row) => [place, values[row], run.regime[row]]).filter((row) => row[0] != null && row[1] != null);
  const present = REGIMES.filter((regime) => rows.some((row) => row[2] === regime));
  const data = [rows.map((row) => row[0]), rows.map((row) => row[1]), ...present.map((regime) => rows.map((row) => (row[2] === regime ? row[1] : null)))];
  const marks = rows.length > 150 ? 3 : 6;
  const series = [
    { label: name, stroke: colour("soft"), width: 1.2, points: { show: false }, value: (_, value) => figure(value) },
    ...present.map((regime) => ({ label: regime, stroke: colour(regime), width: 0, paths: () => null, points: { show: true, size: marks, fill: colour(regime) }, value: (_, value) => figure(value) })),
  ];
  return { data, series };
}

// Several runs: a line each, told apart by colour and dashes.
function overlaid(runs, name, x) {
  const tables = runs.map((run) => {
    const values = run.metrics[name] ?? [];
    const rows = run[x].map((place, row) => [place, values[row]]).filter((row) => row[0] != null && row[1] != null);
    return [rows.map((row) => row[0]), rows.map((row) => row[1])];
  }).map((table, number) => [table, runs[number].run]).filter(([table]) => table[0].length);
  if (!tables.length) return { data: [[]], series: [] };
  const colours = ["datacenter", "rejected", "federated", "hybrid", "dropped", "late"];
  const data = tables.length > 1 ? uPlot.join(tables.map(([table]) => table)) : tables[0][0];
  const series = tables.map(([, label], number) => ({ label, stroke: colour(colours[number % 6]), dash: DASHES[number % 6], width: 1.8, spanGaps: true, points: { show: false }, value: (_, value) => figure(value) }));
  return { data, series };
}

async function read(address) {
  const answer = await fetch(address);
  return answer.ok ? answer.json() : null;
}

function drawQuality(section, runs, select) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const wanted = select.value || sessionStorage.getItem("metric") || names[0];
  if (names.join() !== [...select.options].map((each) => each.value).join()) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
  const chosen = names.includes(wanted) ? wanted : names[0];
  select.value = chosen ?? "";
  section.querySelector(".charts").hidden = !names.length;
  const empty = section.querySelector(".empty");
  empty.hidden = names.length > 0;
  // Not in the page, which a browser without scripts or styles would show in any case.
  empty.textContent = names.length ? "" : "No round was evaluated so far.";
  if (!chosen) return;
  for (const box of section.querySelectorAll(".plot")) {
    const x = box.dataset.x;
    const { data, series } = runs.length > 1 ? overlaid(runs, chosen, x) : single(runs[0], chosen, x);
    draw(box, data, series, x);
    box.setAttribute("role", "img");
    const last = runs[0].metrics[chosen]?.filter((value) => value != null).at(-1);
    box.setAttribute("aria-label", `${chosen} against ${x}; the latest is ${figure(last)}`);
  }
}

function drawRates(holder, run) {
  const titles = JSON.parse(holder.dataset.titles);
  const drawings = []; // after all figures are in the grid, which gives them their width
  for (const [name, figures] of Object.entries(run.profile)) {
    for (const [key, values] of Object.entries(figures)) {
      const id = `${name}/${key}`;
      let box = [...holder.querySelectorAll(".plot")].find((each) => each.dataset.id === id);
      if (!box) {
        const frame = document.createElement("figure");
        const caption = document.createElement("figcaption");
        caption.textContent = `${name}: ${titles[key] ?? key}`;
        box = document.createElement("div");
        box.className = "plot";
        box.dataset.id = id;
        frame.append(caption, box);
        holder.append(frame);
      }
      const rows = run.round.map((round, row) => [round, values[row]]).filter((row) => row[1] != null);
      drawings.push(() => draw(box, [rows.map((row) => row[0]), rows.map((row) => row[1])], [{ label: key, stroke: colour("datacenter"), width: 1.6, points: { show: rows.length < 80, size: 5 }, value: (_, value) => figure(value) }], "round"));
    }
  }
  drawings.forEach((drawn) => drawn());
}

export function drawCharts() {
  const section = document.getElementById("quality");
  if (!section) return async () => {};
  const select = document.getElementById("metric");
  const rates = document.getElementById("rates");
  const others = section.dataset.compare.split(",").filter(Boolean);
  let runs = [];

  function drawAll() {
    if (!runs.length) return;
    drawQuality(section, runs, select);
    if (rates) drawRates(rates, runs[0]);
  }

  async function load() {
    const addresses = [section.dataset.series, ...others.map((name) => `/runs/${encodeURIComponent(name)}/series.json`)];
    runs = (await Promise.all(addresses.map(read))).filter(Boolean);
    drawAll();
  }

  select.addEventListener("change", () => {
    sessionStorage.setItem("metric", select.value);
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = section.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(section.clientWidth - width) > 4) {
      width = section.clientWidth;
      drawAll();
    }
  }).observe(section);
  load();
  return load;
}
