// What a page of annotated source can do beyond being read. Without this script the page
// is complete; no part of it depends on the theme.

/** Keep in the address what is chosen, beside an anchor: `#L42&t=attn&q_len=50`. */
const remember = (anchor, changes) => {
  const [old, ...rest] = location.hash.slice(1).split("&");
  const state = new URLSearchParams(rest.join("&"));
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) state.delete(name);
    else state.set(name, value);
  }
  const parts = [anchor ?? old, `${state}`].filter(Boolean);
  history.replaceState(null, "", `#${parts.join("&")}`);
};

{
  // Copying: a link to a file becomes a button that copies the file. Where that cannot
  // be, as on a page that was opened from a folder, it remains a link.
  const files = document.querySelectorAll(".sn-copy");
  for (const link of globalThis.ClipboardItem && navigator.clipboard ? files : []) {
    const name = link.textContent;
    const plain = async () => {
      const text = await (await fetch(link.href)).text();
      return new Blob([text], { type: "text/plain" });
    };
    link.setAttribute("role", "button");
    link.setAttribute("aria-live", "polite");
    link.addEventListener("click", async (event) => {
      event.preventDefault();
      try {
        await navigator.clipboard.write([new ClipboardItem({ "text/plain": plain() })]);
      } catch {
        location.assign(link.href);
        return;
      }
      link.textContent = "Copied";
      setTimeout(() => (link.textContent = name), 1500);
    });
    link.addEventListener("keydown", (event) => {
      if (event.key !== " ") return;
      event.preventDefault();
      link.click();
    });
  }

  // A block that scrolls must be reachable by keyboard; one that does not is no tab stop.
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  // A theme may wrap its tables while the page loads.
  addEventListener("load", () => {
    const blocks =
      "pre, pre > code, figure, div.arithmatex, div:has(> table, > div > table)";
    for (const block of document.querySelectorAll(blocks)) watch.observe(block);
  });
}

// What was recorded of a run: a card beside each shape, and the inspector, a debugger
// whose steps have already been taken. The data is part of the page.

for (const holder of document.querySelectorAll(".sn-data")) {
  const { calls, tensors } = JSON.parse(holder.textContent);
  const strips = [...document.querySelectorAll(".sn-code [data-line]")];
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  /** An element with properties, attributes (`aria-…`, `data-…`, `role`) and children. */
  const make = (tag, properties = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (/^(aria-|data-|role|scope)/.test(name)) element.setAttribute(name, value);
      else element[name] = value;
    }
    element.append(...children);
    return element;
  };

  /** The call that ran a line, and its nth step there, or the last to assign a value. */
  const find = (line, nth = 0) => {
    for (const call of calls) {
      const steps = [...call.steps.keys()].filter((i) => call.steps[i].line === line);
      const last = steps.findLast((i) => call.steps[i].values.length) ?? steps.at(-1);
      if (steps.length) return { call, step: nth ? (steps[nth - 1] ?? last) : last };
    }
    return null;
  };

  /** By name, what a call holds once the step is done. */
  const alive = (call, step) => {
    const taken = call.steps.slice(0, step + 1).flatMap((each) => each.values);
    return new Map([...call.arguments, ...taken].map((value) => [value.name, value]));
  };

  const sizesOf = ({ axes, sizes }) =>
    axes.map((a, i) => (a === `${sizes[i]}` ? a : `${a} = ${sizes[i]}`)).join(", ") ||
    "a single number";

  const memoryOf = ({ strides, contiguous, of }) =>
    [
      strides?.length ? `strides ${strides.join(", ")}` : "",
      contiguous === null ? "" : contiguous ? "contiguous" : "not contiguous",
      of ? `in the memory of ${of}` : "",
    ]
      .filter(Boolean)
      .join(" · ");

  // The card

  const card = make("div", {
    className: "sn-card",
    id: "sn-card",
    role: "tooltip",
    hidden: true,
  });
  document.body.append(card);
  let owner = null; // what the card is about
  let waiting = 0;

  const showCard = (element, values) => {
    clearTimeout(waiting);
    owner?.removeAttribute("aria-describedby");
    owner = element;
    card.replaceChildren(
      ...values.map((value) =>
        make(
          "p",
          {},
          make("strong", {}, value.name),
          ` ${value.dtype}, ${sizesOf(value)}`,
          make("br"),
          make("small", {}, memoryOf(value)),
        ),
      ),
    );
    card.hidden = false;
    element.setAttribute("aria-describedby", "sn-card");
    placeCard();
  };

  const placeCard = () => {
    const box = owner.getBoundingClientRect();
    const { width, height } = card.getBoundingClientRect();
    const room = innerHeight - (panel.isConnected ? panel.offsetHeight : 0);
    const below = box.bottom + 6 + height < room;
    card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    card.style.top = `${below ? box.bottom + 6 : box.top - height - 6}px`;
  };

  const hideCard = () => {
    clearTimeout(waiting);
    owner?.removeAttribute("aria-describedby");
    owner = null;
    card.hidden = true;
    for (const use of document.querySelectorAll(".sn-use")) use.classList.remove("sn-use");
  };
  // A pointer on its way to the card may leave what the card is about.
  const hideSoon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(hideCard, 150);
  };
  card.addEventListener("pointerenter", () => clearTimeout(waiting));
  card.addEventListener("pointerleave", hideSoon);
  // What has the focus keeps its card: giving it the focus may be what scrolls the page.
  const scrolled = () => {
    if (owner && owner === document.activeElement) placeCard();
    else hideCard();
  };
  addEventListener("scroll", scrolled, { passive: true, capture: true });

  // The strip: one tab stop a block, arrows lead from one shape to the next.

  const firsts = new Set();
  for (const [n, strip] of strips.entries()) {
    const line = Number(strip.dataset.line);
    const place = find(line);
    if (!place) continue;
    const { values } = place.call.steps[place.step];
    const block = strip.closest(".sn-code");
    strip.tabIndex = firsts.has(block) ? -1 : 0;
    firsts.add(block);
    strip.setAttribute("role", "button");
    strip.setAttribute("aria-haspopup", "dialog");
    const names = values.map((value) => value.name).join(", ");
    const shape = strip.textContent.replace(/^# /, "");
    strip.setAttribute("aria-label", `${shape}, values of ${names}, line ${line}`);

    let wasShown = false; // a first tap shows the card, a second one opens
    const open = () => openAt(place, values[0]?.name, strip);
    strip.addEventListener("pointerdown", () => (wasShown = owner === strip));
    // Not when the line moves under a pointer that rests.
    strip.addEventListener("pointermove", ({ pointerType }) => {
      clearTimeout(waiting);
      if (pointerType !== "touch" && owner !== strip) showCard(strip, values);
    });
    strip.addEventListener("pointerleave", ({ pointerType }) => {
      if (pointerType !== "touch") hideSoon();
    });
    strip.addEventListener("focus", () => showCard(strip, values));
    strip.addEventListener("blur", hideCard);
    strip.addEventListener("click", (event) => {
      if (event.pointerType !== "touch" || wasShown) open();
      else showCard(strip, values);
    });
    strip.addEventListener("keydown", (event) => {
      const way = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") open();
      else if (way) strips[n + way]?.focus();
      else return;
      event.preventDefault();
    });
  }

  // A variable under the pointer: its uses in the same function, and its card.

  /** The name that a token of the source stands for, if it is a variable's. */
  const nameOf = (token) => {
    const [dot, self] = [token.previousSibling, token.previousSibling?.previousSibling];
    if (token.nextSibling?.textContent === "=") return null; // names an argument
    if (dot?.textContent !== ".") return token.textContent;
    return self?.textContent === "self" ? `self.${token.textContent}` : null;
  };

  let pointed = null; // the token under a pointer that has moved
  document.addEventListener("pointermove", ({ target }) => {
    const token = target.closest?.(".sn-code .n") ?? null;
    if (token === pointed) return;
    pointed = token;
    const line = Number(token?.closest("[id^=L]")?.id.slice(1));
    const name = token && nameOf(token);
    if (!name || !line || target.closest("[data-line]")) return;
    const within = ({ line: first, steps }) =>
      first <= line && line <= Math.max(...steps.map((step) => step.last));
    const call = calls.findLast(within);
    const known = call && alive(call, Infinity).has(name);
    if (!known) return;
    hideCard();
    const last = Math.max(...call.steps.map((step) => step.last));
    for (let n = call.line; n <= last; n++) {
      for (const other of document.getElementById(`L${n}`)?.querySelectorAll(".n") ?? []) {
        if (nameOf(other) === name) other.classList.add("sn-use");
      }
    }
    const leave = () => {
      pointed = null;
      hideSoon();
    };
    token.addEventListener("pointerleave", leave, { once: true });
    const at = call.steps.findLastIndex((step) => step.line <= line && line <= step.last);
    if (at < 0) return;
    // Left of the equals sign the name has its new value, right of it still the old.
    let before = "";
    for (let node = token; (node = node.previousSibling);) before += node.textContent;
    const value = alive(call, before.includes("=") ? at - 1 : at).get(name);
    if (value) showCard(token, [value]);
  });

  // The inspector

  const state = { call: null, step: 0, name: "", rows: null, columns: null, at: [] };
  let opener = null;

  const button = (text, label, onclick) =>
    make("button", { type: "button", "aria-label": label, title: label, onclick }, text);
  const title = make("code");
  const status = make("span", { role: "status" });
  const back = button("\u2190", "Step back", () => walk(-1));
  const forward = button("\u2192", "Step forward", () => walk(1));
  const close = button("\u00d7", "Close the inspector", () => shut());
  const list = make("div", {
    className: "sn-alive",
    role: "group",
    "aria-label": "Tensors alive",
  });
  const facts = make("p", { className: "sn-facts" });
  const controls = make("div", { className: "sn-controls" });
  const values = make("div", { className: "sn-values", tabIndex: 0, role: "region" });
  const panel = make(
    "div",
    { className: "sn-inspector", role: "dialog", "aria-label": "Inspector", tabIndex: -1 },
    make("div", { className: "sn-head" }, title, status, back, forward, close),
    make("div", { className: "sn-body" }, list, make("div", {}, facts, controls, values)),
  );

  function openAt({ call, step }, name, from) {
    hideCard();
    opener = from ?? opener;
    if (!panel.isConnected) document.body.append(panel);
    document.documentElement.classList.add("sn-inspecting");
    Object.assign(state, { call, step });
    show(name);
    panel.focus({ preventScroll: true });
  }

  function shut() {
    const { line } = state.call.steps[state.step];
    panel.remove();
    document.documentElement.classList.remove("sn-inspecting");
    for (const old of document.querySelectorAll(".sn-current")) mark(old, false);
    remember(`L${line}`, { t: null, n: null });
    const here = strips.find((strip) => Number(strip.dataset.line) === line);
    (opener ?? here)?.focus({ preventScroll: true });
    opener = null;
  }

  function walk(way) {
    const step = state.step + way;
    if (!state.call.steps[step]) return;
    state.step = step;
    show(state.call.steps[step].values[0]?.name ?? state.name);
  }

  const mark = (line, on) => {
    line.classList.toggle("sn-current", on);
    if (on) line.setAttribute("aria-current", "step");
    else line.removeAttribute("aria-current");
  };

  /** Scroll a line into what the inspector leaves free, if it is not there. */
  function bring(line) {
    for (let e = line; (e = e.closest("details:not([open])")); ) e.open = true;
    const { top } = line.getBoundingClientRect();
    const free = innerHeight - panel.offsetHeight;
    if (top > 100 && top < free - 60) return;
    scrollBy({ top: top - free / 2, behavior: still.matches ? "instant" : "smooth" });
  }

  /** Draw the state: the line in the source, the tensors alive, and one of them. */
  function show(name) {
    const { call } = state;
    const { line, last, values: assigned } = call.steps[state.step];
    const living = alive(call, state.step);
    const value = living.get(name) ?? [...living.values()].at(-1);
    const before = state.value;
    Object.assign(state, { name: value?.name ?? "", value });

    for (const old of document.querySelectorAll(".sn-current")) mark(old, false);
    for (let n = line; n <= last; n++) {
      const element = document.getElementById(`L${n}`);
      if (element?.closest(".sn-code")) mark(element, true);
    }
    bring(document.getElementById(`L${line}`));

    title.textContent = call.symbol;
    const news = assigned.map((each) => `${each.name} is [${each.axes.join(", ")}]`);
    status.textContent = [
      `Step ${state.step + 1} of ${call.steps.length}, line ${line}`,
      ...news,
    ].join("; ");
    back.setAttribute("aria-disabled", state.step === 0);
    forward.setAttribute("aria-disabled", state.step === call.steps.length - 1);

    const fresh = new Set(assigned.map((each) => each.name));
    keepFocus(
      list,
      [...living.keys()].map((each) =>
        make(
          "button",
          {
            type: "button",
            className: fresh.has(each) ? "sn-fresh" : "",
            "aria-pressed": each === state.name,
            "data-key": each,
            onclick: () => show(each),
          },
          each,
        ),
      ),
    );

    const times = call.steps
      .slice(0, state.step + 1)
      .filter((step) => step.line === line).length;
    const all = call.steps.filter((step) => step.line === line).length;
    remember(`L${line}`, { t: state.name, n: times < all ? times : null });

    // The selected axes stay the same as long as the shape does.
    if (`${before?.axes}|${before?.sizes}` !== `${value?.axes}|${value?.sizes}`) lay(value);
    draw();
  }

  /** Replace children by new ones; where the focus was on one, it is on its successor. */
  function keepFocus(parent, children) {
    const { key } = parent.contains(document.activeElement)
      ? document.activeElement.dataset
      : {};
    parent.replaceChildren(...children);
    if (!key) return;
    const same = children.flatMap((c) => [c, ...c.querySelectorAll("[data-key]")]);
    (same.find((c) => c.dataset.key === key) ?? panel).focus({ preventScroll: true });
  }

  /** Choose two axes to look at: lengths of sequences first, else the last ones. */
  function lay(value) {
    const axes = value?.axes ?? [];
    const length = (i) => Number(/len/.test(axes[i]));
    const [a, b] = [...axes.keys()].sort((i, j) => length(j) - length(i) || j - i);
    state.columns = b === undefined ? a : Math.max(a, b);
    state.rows = b === undefined ? undefined : Math.min(a, b);
    state.at = axes.map(() => 0);
  }

  const called = (value, axis) =>
    value.axes[axis] === `${value.sizes[axis]}` ? `axis ${axis}` : value.axes[axis];

  /** The controls: which axes are rows and columns, a slider for each of the others. */
  function draw() {
    const { value } = state;
    values.setAttribute("aria-label", `Values of ${state.name}`);
    if (!value) {
      for (const part of [facts, controls, values]) part.replaceChildren();
      return;
    }
    facts.replaceChildren(
      make("strong", {}, value.name),
      ` ${value.dtype}, ${sizesOf(value)} · ${memoryOf(value)}`,
    );
    const chosen = [state.rows, state.columns];
    const parts = [];
    if (value.sizes.length > 2) {
      for (const role of ["rows", "columns"]) {
        const select = make("select", { "data-key": role });
        for (const axis of value.axes.keys()) {
          select.append(new Option(called(value, axis), axis, false, axis === state[role]));
        }
        select.onchange = () => {
          const other = role === "rows" ? "columns" : "rows";
          if (Number(select.value) === state[other]) state[other] = state[role];
          state[role] = Number(select.value);
          draw();
        };
        parts.push(make("label", {}, `${role} `, select));
      }
    }
    for (const axis of value.axes.keys()) {
      if (chosen.includes(axis) || value.sizes[axis] < 2) continue;
      const shown = make("span", {}, state.at[axis]);
      const slider = make("input", {
        type: "range",
        min: 0,
        max: value.sizes[axis] - 1,
        step: 1,
        "data-key": `at${axis}`,
      });
      slider.value = state.at[axis];
      slider.oninput = () => {
        state.at[axis] = Number(slider.value);
        shown.textContent = slider.value;
        fill();
      };
      parts.push(make("label", {}, `${called(value, axis)} `, slider, shown));
    }
    keepFocus(controls, parts);
    fill();
  }

  /** The table: a number in each cell, its color beside it, the sum of each row. */
  function fill() {
    const { value, rows, columns, at } = state;
    const numbers = value.data === null ? null : tensors[value.data];
    if (!numbers) {
      values.replaceChildren(make("p", {}, "Too many numbers for this page."));
      return;
    }
    const finite = numbers.filter(Number.isFinite);
    const [low, high] = [
      finite.reduce((a, b) => Math.min(a, b), Infinity),
      finite.reduce((a, b) => Math.max(a, b), -Infinity),
    ];
    const pick = (row, column) => {
      const index = [...at];
      if (rows !== undefined) index[rows] = row;
      if (columns !== undefined) index[columns] = column;
      return numbers[value.sizes.reduce((sum, size, axis) => sum * size + index[axis], 0)];
    };
    const [height, width] = [value.sizes[rows] ?? 1, value.sizes[columns] ?? 1];
    const named = [rows, columns].filter((axis) => axis !== undefined);
    const corner = named.map((axis) => called(value, axis)).join(" \u00d7 ");
    const head = make("tr", {}, make("td", {}, corner));
    if (named.length) {
      for (let c = 0; c < width; c++) head.append(make("th", { scope: "col" }, c));
      head.append(make("th", { scope: "col", className: "sn-sum" }, "sum"));
    }
    const body = make("tbody");
    for (let r = 0; r < height; r++) {
      const first = rows === undefined ? make("td") : make("th", { scope: "row" }, r);
      const line = make("tr", {}, first);
      const cells = Array.from({ length: width }, (_, c) => pick(r, c));
      for (const number of cells) {
        const cell = make("td", {}, written(number, value.dtype));
        const part = high > low ? (number - low) / (high - low) : 0.5;
        if (Number.isFinite(number)) paint(cell, part);
        line.append(cell);
      }
      const sum = make("td", { className: "sn-sum" }, summed(cells, value.dtype));
      if (named.length) line.append(sum);
      body.append(line);
    }
    const what = finite.length < numbers.length ? "all finite numbers" : "all numbers";
    const ends = `minimum ${written(low, value.dtype)}, maximum ${written(high, value.dtype)}`;
    const range = finite.length ? `Of ${what}: ${ends}` : "";
    values.replaceChildren(
      make("table", {}, make("thead", {}, head), body),
      make("p", {}, range),
    );
  }

  /** A number with the digits that were recorded: four, or all of an integer. */
  function written(number, dtype) {
    if (dtype === "bool") return number ? "True" : "False";
    const exact = !Number.isFinite(number) || !/float/.test(dtype) || number === 0;
    return exact ? `${number}` : number.toPrecision(4);
  }

  /** A sum with as many decimals as its rounded terms allow. */
  function summed(cells, dtype) {
    if (!cells.every(Number.isFinite)) return "";
    const sum = cells.reduce((a, b) => a + b, 0);
    if (!/float/.test(dtype)) return `${sum}`;
    const error = cells.reduce(
      (e, n) => e + (n && 10 ** (Math.floor(Math.log10(Math.abs(n))) - 3)),
      0,
    );
    const text = sum.toFixed(
      error ? Math.min(6, Math.max(0, Math.floor(-Math.log10(error)))) : 0,
    );
    return Number(text) === 0 ? text.replace("-", "") : text;
  }

  // Cividis: even in lightness, and the same to people who see no red or green.
  const CIVIDIS = [
    [0, 34, 78],
    [67, 78, 108],
    [125, 124, 120],
    [188, 174, 108],
    [254, 232, 56],
  ];

  function paint(cell, part) {
    const place = Math.min(3, Math.floor(part * 4));
    const rgb = CIVIDIS[place].map((from, i) =>
      Math.round(from + (CIVIDIS[place + 1][i] - from) * (part * 4 - place)),
    );
    const linear = rgb.map((v) =>
      v / 255 <= 0.04045 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4,
    );
    const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    cell.style.background = `rgb(${rgb})`;
    cell.style.color = light > 0.179 ? "#000" : "#fff";
  }

  // The keys of the inspector, and links into it

  panel.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const scrolls = values.scrollWidth > values.clientWidth && event.target === values;
    if (!way || scrolls || event.target.matches("input, select")) return;
    event.preventDefault();
    walk(way);
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    hideCard();
    if (panel.isConnected) shut();
  });
  for (const button of document.querySelectorAll(".sn-step")) {
    const [longest] = calls.toSorted((a, b) => b.steps.length - a.steps.length);
    button.hidden = false;
    button.setAttribute("aria-haspopup", "dialog");
    button.addEventListener("click", () => openAt({ call: longest, step: 0 }, "", button));
  }

  const follow = () => {
    const [, line] = /^#L(\d+)&/.exec(location.hash) ?? [];
    const asked = new URLSearchParams(location.hash);
    const place = line && asked.has("t") && find(Number(line), Number(asked.get("n")));
    if (place) openAt(place, asked.get("t"), null);
  };
  addEventListener("hashchange", follow);
  follow();
}

// Sizes that a reader may choose, and all shapes of the page at these sizes.

for (const panel of document.querySelectorAll(".sn-sizes")) {
  const fields = [...panel.querySelectorAll("[type=number]")];
  const totals = [...panel.querySelectorAll("[data-formula]")];
  const toggle = document.querySelector(".sn-try");
  const close = panel.querySelector("button");
  const chosen = Object.fromEntries(fields.map((f) => [f.name, f.valueAsNumber]));
  const isOpen = () => toggle.ariaExpanded === "true";

  /** Where a slider stops: at each small size, and further apart the larger they are. */
  const stopsTo = (most) => {
    const stops = [1];
    while (stops.at(-1) < most) {
      const last = stops.at(-1);
      stops.push(Math.min(most, Math.max(last + 1, Math.round(last * 1.1))));
    }
    return stops;
  };
  const sliders = fields.map((field) => {
    const slider = field.closest(".sn-size").querySelector("[type=range]");
    const stops = stopsTo(Number(field.max));
    slider.max = stops.length - 1;
    slider.addEventListener("input", () => (field.value = stops[slider.value]));
    return { slider, stops };
  });

  /** The value of an expression of names, integers and + - * //; NaN for another. */
  const valueOf = (text) => {
    const tokens = text.match(/\w+|\/\/|[-+*()]/g) ?? [];
    const atom = () => {
      const token = tokens.shift();
      if (token !== "(") return Number(chosen[token] ?? token);
      const inner = sum();
      tokens.shift();
      return inner;
    };
    const product = () => {
      let value = atom();
      while (/^[*/]/.test(tokens[0])) {
        value = tokens.shift() === "*" ? value * atom() : Math.floor(value / atom());
      }
      return value;
    };
    const sum = () => {
      let value = product();
      while (/^[-+]/.test(tokens[0])) value += tokens.shift() === "+" ? product() : -product();
      return value;
    };
    return sum();
  };

  // Names given to axes stay in the line, and are copied with it; they are only hidden.
  const said = [...document.querySelectorAll(".sn-claim, .sn-shape")].map((strip) => {
    const mark = strip.querySelector(".sn-mark");
    const text = document.createElement("span");
    text.append(...[...strip.childNodes].filter((node) => node !== mark));
    strip.append(text);
    return { strip, text, names: text.textContent, label: strip.ariaLabel };
  });

  const follow = () => {
    for (const [i, field] of fields.entries()) {
      if (field.validity.valid) chosen[field.name] = field.valueAsNumber;
      const { slider, stops } = sliders[i];
      slider.value = stops.findLastIndex((stop) => stop <= chosen[field.name]);
      slider.ariaValueText = chosen[field.name];
    }
    for (const total of totals) {
      const value = valueOf(total.dataset.formula);
      if (total.dataset.name) chosen[total.dataset.name] = value;
      total.textContent = value.toLocaleString("en");
    }
    const open = isOpen();
    for (const { strip, text, names, label } of said) {
      const now = names.replace(/[^\s,[\]][^,[\]]*(?=[,\]])/g, (entry) =>
        Number.isNaN(valueOf(entry)) ? entry : valueOf(entry),
      );
      if (open) text.dataset.now = now;
      else delete text.dataset.now;
      if (label) strip.ariaLabel = open ? label.replace(names.trim(), now.trim()) : label;
    }
  };

  const open = (on) => {
    toggle.ariaExpanded = on;
    panel.parentElement.classList.toggle("sn-open", on);
    follow();
    close.hidden = !on;
  };
  /** Keep the sizes in the address, where they are shown. */
  const keep = () => {
    const now = fields.map(({ name }) => [name, isOpen() ? chosen[name] : null]);
    remember(location.hash.slice(1).split("&")[0] || "sizes", Object.fromEntries(now));
  };
  const show = () => {
    open(true);
    keep();
    fields[0].focus({ preventScroll: true });
  };
  const shut = () => {
    open(false);
    keep();
    toggle.focus({ preventScroll: true });
  };
  toggle.hidden = false;
  for (const { slider } of sliders) slider.hidden = false;
  for (const field of fields) field.readOnly = false;
  toggle.ariaExpanded = false;
  toggle.addEventListener("click", () => (isOpen() ? shut() : show()));
  close.addEventListener("click", shut);
  panel.addEventListener("input", follow);
  // What is no size gives way to the one before.
  panel.addEventListener("change", () => {
    for (const field of fields) field.value = chosen[field.name];
    keep();
  });
  addEventListener("keydown", ({ key }) => {
    if (key === "Escape" && isOpen()) shut();
  });
  panel.addEventListener("submit", (event) => event.preventDefault());

  const fromLink = () => {
    const asked = new URLSearchParams(location.hash);
    const found = fields.filter((field) => asked.has(field.name));
    for (const field of found) field.value = asked.get(field.name);
    if (found.length) open(true);
    for (const field of found) field.value = chosen[field.name];
  };
  addEventListener("hashchange", fromLink);
  fromLink();
}
