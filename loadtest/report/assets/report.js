"use strict";
// Pointing at a chart shows its values at the nearest moment. Without this script the page loses nothing else.
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const { x, at, lines } = JSON.parse(svg.dataset.hover);
  if (!x.length) continue;
  const cursor = svg.querySelector(".cursor");
  const readout = document.createElement("div");
  readout.className = "readout";
  readout.hidden = true;
  svg.parentElement.append(readout);

  const nearest = (wanted) => {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - x[low] < x[high] - wanted ? low : high;
  };

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const index = nearest((event.clientX - box.left) / scale);
    cursor.setAttribute("x1", x[index]);
    cursor.setAttribute("x2", x[index]);
    readout.replaceChildren();
    const heading = document.createElement("b");
    heading.textContent = at[index];
    readout.append(heading);
    for (const line of lines) {
      const row = document.createElement("div");
      const name = document.createElement("span");
      const value = document.createElement("span");
      name.className = line.style;
      name.textContent = line.name;
      value.textContent = line.shown[index];
      row.append(name, value);
      readout.append(row);
    }
    readout.hidden = false;
    const figure = svg.parentElement.getBoundingClientRect();
    const left = box.left - figure.left + x[index] * scale;
    const flip = left + readout.offsetWidth + 16 > figure.width;
    readout.style.left = `${flip ? left - readout.offsetWidth - 10 : left + 10}px`;
    readout.style.top = `${box.top - figure.top + 12}px`;
  });
  svg.addEventListener("pointerleave", () => {
    readout.hidden = true;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
  });
}
