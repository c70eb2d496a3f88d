// For the scripts of pages, which are loaded after this one.

/** An element with properties, attributes (`aria-…`, `role`, `scope`) and children. */
const make = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(aria-|data-|role|scope)/.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
};
