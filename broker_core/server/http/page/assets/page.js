// Live numbers, plots and keys. Pages work without it; the server renders everything but the plots.
"use strict";
(() => {
  const body = document.body;
  const trouble = document.getElementById("trouble");
  const fresh = document.getElementById("fresh");
  const plots = new Map(); // by id: the plot, and what it draws
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // -- plots ------------------------------------------------------------------------------------------
  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toFixed(1) + "G";
    if (size >= 1e6) return +(value / 1e6).toFixed(1) + "M";
    if (size >= 1e4) return +(value / 1e3).toFixed(1) + "k";
    return String(+value.toFixed(size < 10 ? 2 : 1));
  }

  function span(times) { // what a plot shows, which is less than it could until the broker is up that long
    const seconds = times.length < 2 ? 0 : times[times.length - 1] - times[0];
    if (!seconds) return "";
    return ", last " + (seconds < 90 ? Math.round(seconds) + " s" : Math.round(seconds / 60) + " min");
  }

  function draw(place, text) {
    const told = JSON.parse(text);
    place.parentElement.querySelector(".span").textContent = span(told.times);
    const data = [told.times, ...told.series.map((each) => each.values)];
    const known = plots.get(place.id);
    if (known && known.plot) {
      known.text = text;
      known.plot.setData(data);
      return;
    }
    if (told.times.length < 2) return;
    place.replaceChildren();
    const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
    const plot = new uPlot({
      width: place.clientWidth,
      height: 152,
      padding: [10, 10, 0, 0],
      cursor: { y: false, sync: { key: "time" } },
      legend: { live: true },
      scales: { y: { range: (_, low, high) => [Math.min(low || 0, 0), Math.max(high || 0, 1) * 1.08] } },
      axes: [
        { ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map((at) => (ticks[1] - ticks[0] < 60 ? clock(at) : clock(at).slice(0, 5))) },
        { ...axis, size: 46, space: 28, values: (_, ticks) => ticks.map(short) },
      ],
      series: [
        { label: "at", value: (_, at) => (at === null ? "–" : clock(at)) },
        ...told.series.map((each, at) => {
          const line = color(["--one", "--two", "--three"][at]);
          return { label: each.label, stroke: line, width: 1.5, fill: told.series.length === 1 ? line + "1f" : undefined, points: { show: false }, value: (_, value) => short(value) + (value === null || value === undefined ? "" : told.unit && " " + told.unit) };
        }),
      ],
    }, data, place);
    plots.set(place.id, { plot, text });
  }

  function drawAll() {
    for (const place of document.querySelectorAll(".plot")) draw(place, place.dataset.plot);
  }

  dark.addEventListener("change", () => { // colors are those of the canvas
    for (const [id, { plot, text }] of plots) {
      plot.destroy();
      plots.delete(id);
      draw(document.getElementById(id), text);
    }
  });
  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => {
      for (const [id, { plot }] of plots) plot.setSize({ width: document.getElementById(id).clientWidth, height: 152 });
    });
  });

  // -- live numbers -----------------------------------------------------------------------------------
  function say(text, link) {
    body.classList.toggle("stale", Boolean(text));
    trouble.hidden = !text;
    trouble.replaceChildren(text || "");
    if (link) {
      const to = document.createElement("a");
      to.href = link;
      to.textContent = "Log in";
      trouble.append(" ", to);
    }
  }

  function take(page) {
    for (const place of document.querySelectorAll("[data-live]")) {
      const found = page.getElementById(place.id);
      if (!found || found.innerHTML === place.innerHTML) continue;
      const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      place.replaceChildren(...found.childNodes);
      if (focused) [...place.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
    }
    for (const place of document.querySelectorAll(".plot")) {
      const found = page.getElementById(place.id);
      if (found) draw(place, found.dataset.plot);
    }
  }

  async function refresh() {
    const at = new URL(location.href);
    at.searchParams.delete("peek"); // the messages stay as they were looked at
    at.hash = "";
    let answer;
    try {
      answer = await fetch(at, { redirect: "manual", cache: "no-store", signal: AbortSignal.timeout(20000) });
    } catch {
      say("The broker does not answer. These are the last numbers; trying again.");
      return;
    }
    if (answer.type === "opaqueredirect") {
      say("You are logged out.", "/ui/login?next=" + encodeURIComponent(location.pathname + location.search));
      return;
    }
    if (!answer.ok) {
      say(answer.status === 404 ? "This object no longer exists." : "The broker refuses to answer (" + answer.status + ").");
      return;
    }
    take(new DOMParser().parseFromString(await answer.text(), "text/html"));
    say("");
    fresh.textContent = "as of " + new Date().toLocaleTimeString([], { hour12: false });
  }

  async function live() {
    const every = Number(body.dataset.refresh) * 1000;
    if (!every) return;
    for (;;) {
      await new Promise((done) => setTimeout(done, every));
      if (!document.hidden) await refresh();
    }
  }

  // -- keys -------------------------------------------------------------------------------------------
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (event.key === "/") {
      const search = document.getElementById("search");
      if (search) {
        event.preventDefault();
        search.select();
      }
      return;
    }
    const link = document.querySelectorAll("nav a")[Number(event.key) - 1];
    if (link) link.click();
  });

  drawAll();
  live();
})();
