// The theme's search is a dialog without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");

// The theme gives the breadcrumbs the name of the navigation; a screen reader lists both.
document.querySelector(".md-path")?.setAttribute("aria-label", "Breadcrumbs");
