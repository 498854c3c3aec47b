// A line and the values under the pointer. The page says everything without it.
"use strict";
const svgName = "http://www.w3.org/2000/svg";
const tip = document.createElement("div");
tip.id = "tip";

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - points[low - 1][0] < points[low][0] - step ? points[low - 1] : points[low];
}

for (const chart of document.querySelectorAll("svg[data-frame]")) {
  const [left, right, top, bottom, width, height, first, last] = JSON.parse(chart.dataset.frame);
  const curves = [...chart.querySelectorAll("g[data-points]")].map((group) => ({
    name: group.dataset.name,
    points: JSON.parse(group.dataset.points),
    color: getComputedStyle(group).getPropertyValue("--ink"),
  })).filter((curve) => curve.points.length > 0);
  const rule = document.createElementNS(svgName, "line");
  rule.setAttribute("class", "base");
  chart.addEventListener("pointerleave", () => { tip.remove(); rule.remove(); });
  chart.addEventListener("pointermove", (event) => {
    if (curves.length === 0) return;
    const box = chart.getBoundingClientRect();
    const share = ((event.clientX - box.left) * width / box.width - left) / (width - left - right);
    const step = first + Math.max(0, Math.min(1, share)) * (last - first);
    const at = nearest(curves[0].points, step)[0];
    const x = left + (at - first) / (last - first) * (width - left - right);
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: top, y2: height - bottom })) {
      rule.setAttribute(name, value);
    }
    chart.append(rule);
    tip.replaceChildren(`step ${at}`);
    for (const curve of curves) {
      const [where, value] = nearest(curve.points, at);
      const line = document.createElement("div");
      const key = document.createElement("b");
      key.style.background = curve.color;
      const place = where === at ? "" : ` (step ${where})`;
      line.append(key, `${curve.name} ${Number(value.toPrecision(5))}${place}`);
      tip.append(line);
    }
    chart.parentElement.append(tip);
    const over = x / width > 0.6;
    tip.style.top = `${top * box.height / height + 8}px`;
    tip.style.left = over ? "" : `${x * box.width / width + 18}px`;
    tip.style.right = over ? `${(width - x) * box.width / width + 18}px` : "";
  });
}
