// What a page of annotated source can do beyond being read. Without this script the page
// is complete; no part of it depends on the theme.

{
  // Copying: each button carries its text with it, so no request is made.
  for (const button of document.querySelectorAll(".sn-bar button")) {
    if (!navigator.clipboard) break; // only in a secure context
    const label = button.firstChild;
    const name = label.textContent;
    button.hidden = false;
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.querySelector("textarea").value);
      label.textContent = "Copied";
      setTimeout(() => (label.textContent = name), 1500);
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
    const blocks = "pre, pre > code, div.arithmatex, div:has(> table, > div > table)";
    for (const block of document.querySelectorAll(blocks)) watch.observe(block);
  });
}
