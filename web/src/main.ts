import { mount } from "svelte";
import App from "./App.svelte";
import "./page.css";

export { answeredBy } from "./lib/ask";

/** Draw the page into an element; returns what takes it away again. */
export function show(target: Element): Record<string, unknown> {
  return mount(App, { target });
}

const own = document.getElementById("cutaway");
if (own) show(own);
