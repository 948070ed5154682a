// Explanations of memory components whose size does not follow from their name.
import { formatBytes, type MemorySize } from "./sizeQueries";

const TEMPORARY_GRADS = "temporary gradients";

/** Parts of a component, such as “residual 6 MiB, ffn 19 MiB”; empty if it has one part of the same name. */
export function describeParts(memory: MemorySize, component: string): string {
  const parts = Object.entries(memory.peak_details[component] ?? {}).filter(([, bytes]) => bytes > 0);
  if (parts.length === 1 && parts[0]?.[0] === component) return "";
  return parts.map(([name, bytes]) => `${name} ${formatBytes(bytes)}`).join(", ");
}

/** Sentences on the components of these models that need an explanation. */
export function memoryNotes(memories: MemorySize[]): string[] {
  const notes = [`Peak memory on one device; reached in: ${[...new Set(memories.map((memory) => memory.peak_phase))].join(", ")}.`];
  if (memories.some((memory) => memory.peak_details.gradients?.[TEMPORARY_GRADS]))
    notes.push("Gradients: those that are allocated at the peak. At the start of the backward pass these are the gradients of the logits (batch size × context length × vocabulary size × 4 bytes); those of the weights, as large as the weights, are allocated later, while activations are freed.");
  const workspace = memories.find((memory) => memory.peak_details.other?.workspace)?.peak_details.other?.workspace;
  if (workspace) notes.push(`cuBLAS workspace: memory that PyTorch allocates for matrix products on a GPU, ${formatBytes(workspace)} for a model of any size. This is the value of Hopper GPUs; older GPUs need less.`);
  return notes;
}
