// Opening a checkpoint for all screens. The screen is not shown meanwhile, so the error is kept here.
import { session } from "../../lib/session.svelte";
import { urlState } from "../../lib/urlState.svelte";

class CheckpointOpener {
  problem = $state("");

  /** Open the checkpoint and keep the text and the selection of this screen. */
  async open(modelId: string): Promise<void> {
    const kept = Object.fromEntries(["text", "source", "checkpoint", "run_head"].map((name) => [name, urlState.get(name)]));
    this.problem = "";
    try {
      await session.openModel(modelId);
      urlState.update(kept);
    } catch (error) {
      this.problem = (error as Error).message;
    }
  }
}

export const checkpointOpener = new CheckpointOpener();
