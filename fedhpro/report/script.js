"use strict";
// Theme, filter, hovering, copying; and where `fedhpro watch` serves the page, a look at the run every two seconds.
{
  const root = document.documentElement, tip = document.getElementById("tip"), hiddenGroups = new Set();
  const number = value => Math.abs(value) >= 100 ? value.toFixed(1) : String(+value.toPrecision(4));

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  function applyFilter() {
    for (const element of document.querySelectorAll("[data-group]"))
      element.classList.toggle("off", hiddenGroups.has(element.dataset.group));
    for (const button of document.querySelectorAll("[data-filter]"))
      button.setAttribute("aria-pressed", String(!hiddenGroups.has(button.dataset.filter)));
  }

  document.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (button?.dataset.filter) {
      const group = button.dataset.filter;
      hiddenGroups.has(group) ? hiddenGroups.delete(group) : hiddenGroups.add(group);
      applyFilter();
    } else if (button?.classList.contains("copy")) {
      const range = document.createRange();
      range.selectNodeContents(button.previousElementSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      navigator.clipboard?.writeText(button.previousElementSibling.textContent).catch(() => {});
      button.textContent = "copied";
    }
  });

  document.addEventListener("change", event => {
    if (event.target.id !== "methods") return;
    const kept = event.target.value.split(" ");
    hiddenGroups.clear();
    for (const button of document.querySelectorAll("[data-filter]"))
      if (event.target.value && !kept.includes(button.dataset.filter)) hiddenGroups.add(button.dataset.filter);
    applyFilter();
  });

  function showTip(event, words) {
    tip.textContent = words;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
  }

  function hover(svg, event) {
    const data = svg.hoverData ??= JSON.parse(svg.dataset.hover), box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = data.first + (at - data.left) / (data.right - data.left) * (data.last - data.first);
    const shown = data.series.filter(series => !hiddenGroups.has(String(series.group)));
    const places = shown.flatMap(series => series.points.map(point => point[0]));
    if (!places.length) return;
    const x = places.reduce((best, place) => Math.abs(place - wanted) < Math.abs(best - wanted) ? place : best);
    const cursor = svg.querySelector(".cursor");
    const share = data.last > data.first ? (x - data.first) / (data.last - data.first) : 0.5;
    cursor.setAttribute("transform", `translate(${data.left + share * (data.right - data.left)} 0)`);
    cursor.style.visibility = "visible";
    const lines = shown.map(series => [series.label, series.points.find(point => point[0] === x)?.[1]])
      .filter(([, y]) => y !== undefined).sort((a, b) => b[1] - a[1]);
    showTip(event, [`${data.x} ${number(x)}`, ...lines.map(([label, y]) => `${label}: ${number(y)} ${data.unit}`)].join("\n"));
  }

  document.addEventListener("pointermove", event => {
    for (const cursor of document.querySelectorAll(".cursor")) cursor.style.visibility = "hidden";
    const chart = event.target.closest?.("svg[data-hover]"), spot = event.target.closest?.("[data-tip]");
    if (chart) hover(chart, event);
    else if (spot) showTip(event, spot.dataset.tip);
    else tip.hidden = true;
  });

  if (document.body.dataset.live) {
    let seen = null;
    setInterval(async () => {
      try {
        const now = (await fetch(location.pathname, {method: "HEAD", cache: "no-store"})).headers.get("ETag");
        if (seen !== null && now !== seen) {
          const page = new DOMParser().parseFromString(await (await fetch(location.pathname, {cache: "no-store"})).text(), "text/html");
          const open = [...document.querySelectorAll("details")].map(details => details.open);
          document.querySelector("main").replaceWith(page.querySelector("main"));
          document.title = page.title;
          document.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
          applyFilter();
        }
        seen = now;
      } catch { /* the server has stopped: the page stays as it is */ }
    }, 2000);
  }
}
