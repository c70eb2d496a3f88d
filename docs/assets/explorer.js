// The attention explorer: choose a text, and play the steps of the decoder. Without this
// script the page shows the maps of the first text; with it, the same places show yours.

for (const root of document.querySelectorAll(".xp")) {
  const examples = JSON.parse(root.querySelector("script").textContent);
  const select = root.querySelector("select");
  const note = root.querySelector(".xp-note");
  const text = root.querySelector(".xp-text");
  const output = root.querySelector(".xp-output");
  const [back, play, next] = root.querySelectorAll(".xp-steps button");
  const slider = root.querySelector("input");
  const count = root.querySelector(".xp-count");
  const weight = root.querySelector(".xp-cell");
  const heads = root.querySelector(".xp-heads");
  const cards = [...heads.querySelectorAll(".xp-head")];

  const END = "■";
  const INTERVAL = 700; // milliseconds a step
  let example = examples[0];
  let timer = null; // of the next step, while the steps are played

  const shown = (character) => (character === " " ? "·" : character);
  const said = (character) =>
    ({ " ": "a space", [END]: "the end" })[character] ?? `‘${character}’`;

  /** Characters, of which some are marked. */
  const marked = (characters, isMarked) =>
    [...characters].map((c, n) => (isMarked(c, n) ? make("mark", {}, c) : c));

  // Maps: tables whose cells are reached by pointer, or by the arrow keys

  const table = (label, rows) => {
    const head = make("tr", {}, make("td"));
    for (const c of example.text) head.append(make("th", { scope: "col" }, shown(c)));
    const lines = rows.map((row, q) => {
      const cells = row.map((w, k) => {
        const cell = make("td", { tabIndex: q || k ? -1 : 0 }, (w / 1000).toFixed(3));
        cell.style.setProperty("--w", Math.round(w / 10));
        return cell;
      });
      const name = make("th", { scope: "row" }, example.output[q] ?? END);
      return make("tr", {}, name, ...cells);
    });
    return make(
      "table",
      { role: "grid", className: "xp-map", "aria-label": label },
      make("colgroup", {}, make("col", { span: example.text.length + 1 })),
      make("thead", {}, head),
      make("tbody", {}, ...lines),
    );
  };

  /** Show an example: all of its steps. */
  const show = () => {
    example = examples[select.selectedIndex];
    heads.style.setProperty("--columns", example.text.length);
    for (const [n, card] of cards.entries()) {
      const map = card.querySelector("table");
      map.replaceWith(table(map.getAttribute("aria-label"), example.maps[n]));
      const without = example.without[n];
      card
        .querySelector(".xp-without")
        .replaceChildren(...marked(without, (c, i) => c !== example.output[i]));
    }
    note.textContent = example.note;
    slider.max = example.maps[0].length;
    weight.textContent = "Point to a cell, or focus it, to read its weight.";
    showStep(slider.max);
  };

  /** Show the maps as they are when a step has been computed. */
  const showStep = (step) => {
    slider.value = step;
    const now = slider.valueAsNumber;
    const last = Number(slider.max);
    for (const row of heads.querySelectorAll("tbody > tr")) {
      row.className =
        row.rowIndex === now ? "xp-now" : row.rowIndex > now ? "xp-later" : "";
    }
    const done = example.output.slice(0, now);
    text.replaceChildren(example.text);
    output.replaceChildren(...marked(done, (c, n) => c !== example.right[n]));
    if (now === last && example.output !== example.right) {
      output.append(`, not ${example.right}`);
    }
    count.textContent = `step ${now} of ${last}`;
    const generated = said(example.output[now - 1] ?? END);
    slider.setAttribute("aria-valuetext", `${now} of ${last}: generates ${generated}`);
    back.disabled = now === 1;
    next.disabled = now === last;
  };

  // Steps: by button, by slider, by key, or played

  const pause = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const move = (by) => {
    pause();
    showStep(slider.valueAsNumber + by);
  };
  const playNext = () => {
    showStep(slider.valueAsNumber + 1);
    if (slider.value === slider.max) pause();
  };

  back.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  play.addEventListener("click", () => {
    if (timer) return pause();
    if (slider.value === slider.max) showStep(1);
    play.textContent = "Pause";
    timer = setInterval(playNext, INTERVAL);
  });
  slider.addEventListener("input", () => move(0));
  select.addEventListener("change", () => {
    pause();
    show();
  });

  const WAYS = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
  };
  root.addEventListener("keydown", (event) => {
    const way = WAYS[event.key];
    const { target } = event;
    if (!way || target.matches("select, input")) return; // they use these keys
    if (target.matches("button")) {
      if (way[0]) return; // these scroll
      move(way[1]);
    } else {
      const rows = target.closest("table").rows;
      const row = rows[target.parentElement.rowIndex + way[0]];
      // What is no cell, or not computed yet, takes no focus.
      row?.cells[target.cellIndex + way[1]]?.focus();
    }
    event.preventDefault();
  });

  // The exact weight of a cell

  const tell = ({ target }) => {
    const cell = target.closest("td[tabindex]");
    if (!cell) return;
    const map = cell.closest("table");
    const [q, k] = [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];
    const query = said(example.output[q] ?? END);
    const key = said(example.text[k]);
    weight.textContent =
      `${map.getAttribute("aria-label")}: step ${q + 1} generates ${query}, ` +
      `weight ${cell.textContent} on ${key}, character ${k + 1}`;
    text.replaceChildren(...marked(example.text, (c, n) => n === k));
  };
  heads.addEventListener("pointerover", tell);
  heads.addEventListener("focusin", (event) => {
    tell(event);
    // One tab stop a map: the cell that had the focus last.
    const map = event.target.closest("table");
    for (const stop of map.querySelectorAll("[tabindex='0']")) stop.tabIndex = -1;
    event.target.tabIndex = 0;
  });

  for (const control of [select, back, play, next, slider]) control.hidden = false;
  show();
}
