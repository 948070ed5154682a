// The page, wherever it is shown: served, as a file that holds its answers, or in a notebook.
import { mount, unmount } from "svelte";
import App from "./App.svelte";
import { answeredBy } from "./lib/ask";
import { fromFile } from "./lib/frozen";
import { fromKernel, type Kernel } from "./lib/notebook";
import { place } from "./lib/place.svelte";
import "./page.css";

const own = document.getElementById("cutaway");
if (own) {
  const answers = document.getElementById("cutaway-answers");
  if (answers) {
    const { name, held } = JSON.parse(answers.textContent ?? "") as { name: string; held: Record<string, string> };
    answeredBy(fromFile(held, name));
  }
  mount(App, { target: own });
}

/** As notebooks call it. */
export default {
  render({ model, el }: { model: Kernel & { get(name: string): string }; el: HTMLElement }): () => void {
    place.aside(model.get("place"));
    answeredBy(fromKernel(model));
    const shown = mount(App, { target: el });
    return () => void unmount(shown);
  },
};
