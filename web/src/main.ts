// Entry point of the page in its three forms: served, exported as a file with its results, and as a notebook widget.
import { mount, unmount } from "svelte";
import App from "./App.svelte";
import { setLocalResults, setTransport } from "./lib/queryClient";
import { ExportBundle } from "./lib/exportBundle";
import { exportedPage, exportedResults, type ExportedPage } from "./lib/exportTransport";
import { takeExerciseToken } from "./lib/exerciseToken";
import { notebookTransport, type WidgetModel } from "./lib/notebookTransport";
import { urlState } from "./lib/urlState.svelte";
import "./page.css";

const root = document.getElementById("cutaway");
if (root) {
  const exported = exportedPage();
  if (exported) void openExported(root, exported);
  else {
    takeExerciseToken();
    mount(App, { target: root });
  }
}

async function openExported(target: HTMLElement, { name, bundle, bundle_bytes }: ExportedPage): Promise<void> {
  setLocalResults(exportedResults(await ExportBundle.decode(bundle, bundle_bytes), name));
  mount(App, { target });
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
