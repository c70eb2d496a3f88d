// The theme's search is a dialog without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
// Its buttons that copy code are navigation landmarks, of which none has a name.
addEventListener("load", () => {
  for (const buttons of document.querySelectorAll(".md-code__nav"))
    buttons.setAttribute("role", "none");
});

// The theme gives the breadcrumbs the name of the navigation; a screen reader lists both.
document.querySelector(".md-path")?.setAttribute("aria-label", "Breadcrumbs");
