// Entry point of the page in its three forms: served, exported as a file with its results, and as a notebook widget.
import { mount, unmount } from "svelte";
import App from "./App.svelte";
import { setTransport } from "./lib/queryClient";
import { exportedResults, exportTransport } from "./lib/exportTransport";
import { notebookTransport, type WidgetModel } from "./lib/notebookTransport";
import { urlState } from "./lib/urlState.svelte";
import "./page.css";

const root = document.getElementById("cutaway");
if (root) {
  const exported = exportedResults();
  if (exported) {
    const { name, results } = JSON.parse(exported.textContent ?? "") as { name: string; results: Record<string, string> };
    setTransport(exportTransport(results, name));
  }
  mount(App, { target: root });
}

/** anywidget interface: notebooks call `render`. */
export default {
  render({ model, el }: { model: WidgetModel & { get(name: string): string }; el: HTMLElement }): () => void {
    urlState.embed(model.get("url_fragment"));
    setTransport(notebookTransport(model));
    const app = mount(App, { target: el });
    return () => void unmount(app);
  },
};
