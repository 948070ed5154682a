// The page, wherever it is shown: served, as a file that holds its results, or in a notebook.
import { mount, unmount } from "svelte";
import App from "./App.svelte";
import { setTransport } from "./lib/queryClient";
import { exportTransport } from "./lib/exportTransport";
import { notebookTransport, type WidgetModel } from "./lib/notebookTransport";
import { urlState } from "./lib/urlState.svelte";
import "./page.css";

const own = document.getElementById("cutaway");
if (own) {
  const exported = document.getElementById("cutaway-results");
  if (exported) {
    const { name, results } = JSON.parse(exported.textContent ?? "") as { name: string; results: Record<string, string> };
    setTransport(exportTransport(results, name));
  }
  mount(App, { target: own });
}

/** As notebooks call it. */
export default {
  render({ model, el }: { model: WidgetModel & { get(name: string): string }; el: HTMLElement }): () => void {
    urlState.embed(model.get("url_fragment"));
    setTransport(notebookTransport(model));
    const shown = mount(App, { target: el });
    return () => void unmount(shown);
  },
};
