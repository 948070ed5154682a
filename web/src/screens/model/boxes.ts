// Boxes of the block diagram: names, shapes, parameters and explanations of the components of a model.
import type { Screen } from "../../lib/urlState.svelte";
import type { Architecture, AttentionSizes, BlockKind, FfnSizes, Matrix, StackArchitecture, SublayerName } from "./architecture";

export type BoxKind = "input" | "embed" | "norm" | "attn" | "ffn" | "add" | "head" | "output" | "step";

export interface Link {
  label: string;
  screen: Screen;
  params: Record<string, string | number | null>;
}

export interface Box {
  id: string;
  kind: BoxKind;
  title: string;
  shape: string;
  /** Number of parameters; undefined for a step without parameters of its own. */
  parameters?: number;
  note?: string;
  about: string;
  /** Names of formulas in formulas.json. */
  formulas: string[];
  facts: [name: string, value: string][];
  links: Link[];
  /** Sublayer whose steps a click shows. */
  zoom?: SublayerName;
}

/** Part of a block: branches from the residual stream whose outputs are added to it. */
export interface Section {
  /** Norm that all branches share (GPT-J). */
  norm: Box | undefined;
  branches: Box[][];
  add: Box;
  after: Box | undefined;
}

export interface StackDiagram {
  embedding: Box;
  sections: Section[];
  end: Box[];
}

/** What the boxes depend on: the model, the stack, the block and the sites that the Trace screen can show. */
export interface Context {
  architecture: Architecture;
  stackName: string;
  block: number;
  sites: ReadonlySet<string>;
  isUntrained: boolean;
}

const NORM_TITLES: Record<string, string> = { layernorm: "LayerNorm", rmsnorm: "RMSNorm", none: "no norm" };
const NORM_TEXTS: Record<string, string> = {
  layernorm: "LayerNorm subtracts the mean of each token's vector, divides by its standard deviation, and applies a learned gain and bias.",
  rmsnorm: "RMSNorm divides each token's vector by its root mean square and multiplies it by a learned gain.",
};
const POSITION_NAMES: Record<string, string> = { none: "none", rope: "RoPE", alibi: "ALiBi", "relative-bias": "relative bias", disentangled: "disentangled positions", learned: "learned", sinusoidal: "sinusoidal" };
const ACTIVATION_NAMES: Record<string, string> = { gelu: "GELU", gelu_tanh: "GELU (tanh)", gelu_quick: "GELU (quick)", silu: "SiLU", relu: "ReLU", relu2: "ReLU²" };
export const SUBLAYER_TITLES: Record<SublayerName, string> = { attn: "Attention", cross: "Cross-attention", ffn: "FFN" };

export const formatInteger = (value: number): string => value.toLocaleString("en");
export const formatParameters = (count: number): string =>
  count >= 1e9 ? `${(count / 1e9).toFixed(2)} B` : count >= 1e6 ? `${(count / 1e6).toFixed(2)} M` : count >= 1e4 ? `${(count / 1e3).toFixed(1)} k` : formatInteger(count);
export const positionName = (kind: string): string => POSITION_NAMES[kind] ?? kind;
export const activationName = (name: string): string => ACTIVATION_NAMES[name] ?? name;
export const normTitle = (kind: string): string => NORM_TITLES[kind] ?? kind;

const stackOf = ({ architecture, stackName }: Context): StackArchitecture => architecture.stacks[stackName] as StackArchitecture;
export const kindOf = (context: Context): BlockKind => {
  const stack = stackOf(context);
  return stack.block_kinds[stack.blocks[context.block]?.kind ?? 0] as BlockKind;
};
/** Letter of the sequence length: S for the encoder of an encoder-decoder, which has the source as input. */
export const lengthLetter = ({ architecture, stackName }: Context): string => (architecture.form === "encoder-decoder" && stackName === "encoder" ? "S" : "T");
const vectorShape = (context: Context): string => `${lengthLetter(context)} × ${formatInteger(context.architecture.d_model)}`;

/** Links to the Trace screen for a site, if the model has this site. */
function traceLinks(context: Context, site: string, label = "Values in Trace"): Link[] {
  const isDerived = /(^softmax|\.(mask|position|token))$/.test(site);
  if (!isDerived && !context.sites.has(site)) return [];
  const isEncoderOfTwo = context.architecture.form === "encoder-decoder" && context.stackName === "encoder";
  return [{ label, screen: "trace", params: { site, stack: isEncoderOfTwo ? "encoder" : null } }];
}

/** Link to the Attention screen for a head. */
export function headLink(context: Context, sublayer: "attn" | "cross", head: number): Link {
  const { prefix } = stackOf(context);
  const group = context.architecture.form === "encoder-decoder" ? (sublayer === "cross" ? "cross" : context.stackName) : null;
  return { label: `Head ${head} in Attention`, screen: "attention", params: { attention: `${prefix}blocks.${context.block}.${sublayer}`, head, attention_group: group } };
}

// ---------------------------------------------------------------------------------------- the whole model

export function buildStackDiagram(context: Context): StackDiagram {
  const stack = stackOf(context);
  const block = stack.blocks[context.block];
  const names = (["attn", "cross", "ffn"] as const).filter((name) => block?.sublayers[name]);
  const sections: Section[] =
    stack.placement === "parallel"
      ? [{ norm: block?.norm === null ? undefined : normBox(context, "norm", block?.norm ?? 0, "before attention and FFN", "attn.in"), branches: names.map((name) => buildBranch(context, name)), add: addBox(context, "ffn"), after: undefined }]
      : names.map((name) => {
          const after = block?.sublayers[name]?.norm_after ?? null;
          return {
            norm: undefined,
            branches: [buildBranch(context, name)],
            add: addBox(context, name),
            after: after === null ? undefined : normBox(context, `${name}.norm_after`, after, "after the addition", residualSite(context, name)),
          };
        });
  return { embedding: embeddingBox(context), sections, end: buildEnd(context) };
}

/** Norms and sublayer between the residual stream and the addition, in order of computation. */
function buildBranch(context: Context, name: SublayerName): Box[] {
  const sublayer = stackOf(context).blocks[context.block]?.sublayers[name];
  const label = SUBLAYER_TITLES[name] === "FFN" ? "FFN" : SUBLAYER_TITLES[name].toLowerCase();
  return [
    ...(sublayer?.norm_in == null ? [] : [normBox(context, `${name}.norm_in`, sublayer.norm_in, `before ${label}`, `${name}.in`)]),
    name === "ffn" ? ffnBox(context) : attentionBox(context, name),
    ...(sublayer?.norm_out == null ? [] : [normBox(context, `${name}.norm_out`, sublayer.norm_out, `on the output of ${label}`, `${name}.out`)]),
  ];
}

function embeddingBox(context: Context): Box {
  const { architecture } = context;
  const stack = stackOf(context);
  const { embedding, prefix } = stack;
  const position = kindOf(context).attn.position;
  const positionText =
    embedding.position !== "none"
      ? `A ${embedding.position} vector for the position is added.`
      : position === "none"
        ? `No position is added${stack.is_causal ? "; only the causal mask depends on the order of the tokens" : ""}.`
        : `No position is added here: attention uses ${positionName(position)}.`;
  const facts: Box["facts"] = [
    ["token table", `${formatInteger(stack.vocab_size)} × ${formatInteger(embedding.table_dim)}${embedding.is_shared ? ", shared with the encoder" : ""}`],
    ["position", embedding.position === "none" ? `${positionName(position)}${position === "none" ? "" : " in attention"}` : `${positionName(embedding.position)}${embedding.max_positions ? `, ${formatInteger(embedding.max_positions)} positions` : ""}`],
  ];
  if (embedding.table_dim !== architecture.d_model) facts.push(["projection", `${formatInteger(embedding.table_dim)} → ${formatInteger(architecture.d_model)}`]);
  if (embedding.scale !== 1) facts.push(["factor on the token embedding", embedding.scale.toFixed(2)]);
  if (embedding.token_types) facts.push(["token types", String(embedding.token_types)]);
  if (embedding.norm !== "none") facts.push(["norm", normTitle(embedding.norm)]);
  return {
    id: `${prefix}embed`, kind: "embed", title: embedding.position === "none" ? "Embedding" : `Embedding + ${embedding.position} positions`, shape: vectorShape(context),
    parameters: embedding.token_parameters + embedding.other_parameters,
    note: [embedding.is_shared ? "table of the encoder" : "", embedding.norm === "none" ? "" : `then ${normTitle(embedding.norm)}`].filter(Boolean).join(", "),
    about: `The embedding table has one row of ${formatInteger(embedding.table_dim)} numbers per token of the vocabulary. The rows of the tokens of the text are the first values of the residual stream. ${positionText}`,
    formulas: embedding.formulas, facts, links: traceLinks(context, `${prefix}embed`),
  }; // prettier-ignore
}

function normBox(context: Context, id: string, parameters: number, place: string, site: string): Box {
  const stack = stackOf(context);
  const [sublayer = ""] = id.split(".");
  const isPrefixed = site.startsWith(stack.prefix) && site.includes("blocks.");
  return {
    id: `${stack.prefix}${id}`, kind: "norm", title: normTitle(stack.norm), shape: vectorShape(context), parameters,
    about: `${NORM_TEXTS[stack.norm] ?? ""} It is applied ${place}, to each token separately.`,
    formulas: stack.norm === "none" ? [] : [stack.norm === "layernorm" ? "norm.layer" : "norm.rms"],
    facts: [["place", place], ["size of the vector", formatInteger(context.architecture.d_model)]],
    links: traceLinks(context, isPrefixed ? site : `${stack.prefix}blocks.${context.block}.${site}`, sublayer === "norm" ? "Values in Trace" : undefined),
  }; // prettier-ignore
}

function attentionBox(context: Context, name: "attn" | "cross"): Box {
  const stack = stackOf(context);
  const sizes = kindOf(context)[name] as AttentionSizes;
  const site = `${stack.prefix}blocks.${context.block}.${name}`;
  const visible = name === "cross" ? "all tokens of the encoder" : `${stack.is_causal ? "the token itself and the tokens before it" : "all tokens"}${sizes.window ? `, within a window of ${formatInteger(sizes.window)} tokens` : ""}`;
  return {
    id: `${stack.prefix}${name}`, kind: "attn", title: SUBLAYER_TITLES[name], shape: vectorShape(context), parameters: stack.blocks[context.block]?.sublayers[name]?.parameters ?? 0,
    note: attentionNote(sizes), zoom: name,
    about: `For each token, attention computes a weighted sum of value vectors of ${visible}. The weights are the softmax of products of queries and keys. ${formatInteger(sizes.heads)} heads do this in parallel with ${formatInteger(sizes.d_head)} dimensions each.`,
    formulas: ["scores", "pattern", "z", "out"].flatMap((step) => kindOf(context).formulas[`${name}.${step}`] ?? []),
    facts: attentionFacts(sizes, stack.embedding.position),
    links: [headLink(context, name, 0), ...traceLinks(context, `${site}.out`, "Output in Trace")].map((link) => (link.screen === "attention" ? { ...link, label: `Attention patterns of block ${context.block}` } : link)),
  }; // prettier-ignore
}

function attentionNote(sizes: AttentionSizes): string {
  const heads = `${sizes.heads} head${sizes.heads === 1 ? "" : "s"}`;
  const kv = sizes.kind === "latent" ? "latent" : sizes.kv_heads < sizes.heads ? `${sizes.kv_heads} KV` : "";
  const position = ["none", "learned"].includes(sizes.position) || sizes.kind === "cross" ? "" : positionName(sizes.position);
  return [heads, kv, position, sizes.window ? `window ${formatInteger(sizes.window)}` : ""].filter(Boolean).join(" · ");
}

function attentionFacts(sizes: AttentionSizes, embeddingPosition: string): Box["facts"] {
  const facts: Box["facts"] = [["heads", `${sizes.heads} of ${formatInteger(sizes.d_head)} dimensions`]];
  if (sizes.kind === "latent") facts.push(["latent attention", `keys and values from a latent of ${formatInteger(sizes.kv_rank ?? 0)} dimensions${sizes.q_rank ? `, queries from one of ${formatInteger(sizes.q_rank)}` : ""}`]);
  else facts.push(["key-value heads", `${sizes.kv_heads}${sizes.kv_heads === sizes.heads ? ": each head has its own keys and values (multi-head attention)" : sizes.kv_heads === 1 ? ": all heads share keys and values (multi-query attention)" : `: ${sizes.heads / sizes.kv_heads} heads share keys and values (grouped-query attention)`}`]);
  if (sizes.kind !== "cross") facts.push(["position", `${sizes.position === "none" && embeddingPosition !== "none" ? `none in attention; ${embeddingPosition} in the embedding` : positionName(sizes.position)}${sizes.rotary_dim && sizes.rotary_dim < sizes.d_head ? ` on ${sizes.rotary_dim} of ${sizes.d_head} dimensions` : ""}${sizes.buckets ? `, ${sizes.buckets} buckets` : ""}`]);
  if (sizes.kind !== "cross") facts.push(["window", sizes.window ? `${formatInteger(sizes.window)} tokens` : "none: full attention"]);
  if (sizes.softcap) facts.push(["softcap of the scores", String(sizes.softcap)]);
  if (sizes.has_qk_norm) facts.push(["QK-norm", "yes"]);
  if (sizes.has_sink) facts.push(["attention sink", "one learned score per head"]);
  return facts;
}

function ffnBox(context: Context): Box {
  const stack = stackOf(context);
  const sizes = kindOf(context).ffn;
  const site = `${stack.prefix}blocks.${context.block}.ffn`;
  const { formulas } = kindOf(context);
  return {
    id: `${stack.prefix}ffn`, kind: "ffn", title: sizes.kind === "moe" ? "FFN: mixture of experts" : "FFN", shape: vectorShape(context), parameters: stack.blocks[context.block]?.sublayers.ffn?.parameters ?? 0,
    note: ffnNote(sizes), zoom: "ffn",
    about: sizes.kind === "moe"
      ? `A router selects ${sizes.top_k} of ${sizes.experts} experts for each token. Each expert is an FFN with hidden size ${formatInteger(sizes.hidden)}; the outputs of the selected experts are added with the weights of the router.`
      : `The feed-forward network expands each token's vector from ${formatInteger(context.architecture.d_model)} to ${formatInteger(sizes.hidden)} numbers, applies ${activationName(sizes.activation)}${sizes.kind === "mlp" ? "" : " to a gate"}, and projects the result back. It processes each token separately.`,
    formulas: [...(formulas["ffn.router"] ?? []), ...(formulas["ffn.hidden"] ?? []), ...(formulas["ffn.out"] ?? [])],
    facts: ffnFacts(sizes), links: traceLinks(context, `${site}.out`, "Output in Trace"),
  }; // prettier-ignore
}

const ffnNote = (sizes: FfnSizes): string => (sizes.kind === "moe" ? `${sizes.top_k} of ${sizes.experts} experts · hidden ${formatInteger(sizes.hidden)}` : `hidden ${formatInteger(sizes.hidden)} · ${sizes.kind === "mlp" ? "" : "gated "}${activationName(sizes.activation)}`);

function ffnFacts(sizes: FfnSizes): Box["facts"] {
  const facts: Box["facts"] = [["hidden size", formatInteger(sizes.hidden)], ["activation", `${activationName(sizes.activation)}${sizes.expert_kind === "mlp" ? "" : ", gated"}`]];
  if (sizes.experts) facts.push(["experts", `${sizes.experts}, of which ${sizes.top_k} per token`]);
  if (sizes.shared_hidden) facts.push(["shared expert", `hidden size ${formatInteger(sizes.shared_hidden)}, applied to every token`]);
  return facts;
}

/** Site of the residual stream after the addition of a sublayer. */
function residualSite(context: Context, name: SublayerName): string {
  const { prefix } = stackOf(context);
  const block = `${prefix}blocks.${context.block}`;
  if (name === "ffn") return `${block}.resid_post`;
  return name === "attn" && context.sites.has(`${block}.cross.resid_pre`) ? `${block}.cross.resid_pre` : `${block}.resid_mid`;
}

function addBox(context: Context, name: SublayerName): Box {
  const stack = stackOf(context);
  const isParallel = stack.placement === "parallel";
  const what = isParallel ? "The outputs of attention and FFN are" : `The output of ${name === "ffn" ? "the FFN" : SUBLAYER_TITLES[name].toLowerCase()} is`;
  const facts: Box["facts"] = [["norm placement", stack.placement]];
  if (stack.skip_scale !== 1) facts.push(["factor on the residual stream", stack.skip_scale.toFixed(3)]);
  if (stack.residual_scale !== 1) facts.push(["factor on the output", stack.residual_scale.toFixed(3)]);
  return {
    id: `${stack.prefix}${name}.add`, kind: "add", title: "+", shape: vectorShape(context),
    about: `${what} added to the residual stream (the line on the left). The shape stays ${vectorShape(context)}.`,
    formulas: isParallel ? ["add.both"] : ["add"], facts, links: traceLinks(context, residualSite(context, name), "Residual stream in Trace"),
  }; // prettier-ignore
}

/** Boxes after the blocks: final norm, and head or pooler for the stack with the output. */
function buildEnd(context: Context): Box[] {
  const { architecture, stackName } = context;
  const stack = stackOf(context);
  const boxes: Box[] = [];
  if (stack.final_norm !== null) boxes.push({ ...normBox(context, "final_norm", stack.final_norm, "after the last block", ""), title: `Final ${normTitle(stack.norm)}`, formulas: stack.final_norm_formulas, links: traceLinks(context, `${stack.prefix}final_norm`) });
  if (architecture.form === "encoder-decoder" && stackName === "encoder") {
    boxes.push({ id: "encoder.output", kind: "output", title: "Encoder output", shape: vectorShape(context), about: "The cross-attention of every decoder block computes keys and values from these vectors. They are computed once per source text.", formulas: [], facts: [["used by", "cross-attention of every decoder block"]], links: traceLinks(context, "encoder.final_norm") });
    return boxes;
  }
  if (!architecture.head) boxes.push({ id: "hidden_states", kind: "output", title: "Hidden states", shape: vectorShape(context), about: "This model has no language-model head: its output is one vector per token.", formulas: [], facts: [], links: traceLinks(context, `${stack.prefix}final_norm`) });
  if (architecture.pooler !== null) boxes.push({ id: "pooler", kind: "head", title: architecture.head ? "Pooler (beside the head)" : "Pooler", shape: `1 × ${formatInteger(architecture.d_model)}`, parameters: architecture.pooler, about: "The pooler applies a linear layer and tanh to the vector of the first token. The result is one vector for the whole text.", formulas: [], facts: [], links: [] });
  if (architecture.head) boxes.push(headBox(context));
  return boxes;
}

function headBox(context: Context): Box {
  const { architecture } = context;
  const head = architecture.head as NonNullable<Architecture["head"]>;
  const facts: Box["facts"] = [
    ["output matrix", `${formatInteger(architecture.d_model)} → ${formatInteger(architecture.vocab_size)}`],
    ["tied", head.is_tied ? "yes: the output matrix is the token embedding table" : "no: a matrix of its own"],
  ];
  if (head.has_transform) facts.push(["before the output matrix", "linear layer, activation and norm"]);
  if (head.has_bias) facts.push(["bias", "one per token of the vocabulary"]);
  if (head.softcap) facts.push(["softcap of the logits", String(head.softcap)]);
  return {
    id: "head", kind: "head", title: "Head", shape: `T × ${formatInteger(architecture.vocab_size)}`, parameters: head.parameters, note: head.is_tied ? "tied to the embedding" : "",
    about: `The head multiplies each vector with the output matrix. The result is one logit for each of the ${formatInteger(architecture.vocab_size)} tokens of the vocabulary; softmax converts logits to probabilities.`,
    formulas: [...head.formulas, "softmax"], facts,
    links: [...traceLinks(context, "logits", "Logits in Trace"), ...(architecture.form === "encoder" ? [] : [{ label: "Generate text", screen: "generate", params: {} } as Link])],
  }; // prettier-ignore
}

// ---------------------------------------------------------------------------------------- inside a sublayer

const inputWidth = (matrix: Matrix): number => matrix.shape.at(-1) ?? 0;
const outputWidth = (matrix: Matrix): number => matrix.shape.at(-2) ?? 0;
const matrixSizes = (matrix: Matrix): string => `${formatInteger(inputWidth(matrix))} → ${formatInteger(outputWidth(matrix))}`;

export interface AttentionSteps {
  inputs: Box[];
  /** Columns of projections from the inputs; the projections of a column follow each other. */
  projections: Box[][];
  /** QK-norm and RoPE: steps between the projections and the heads. */
  prepared: Box[];
  /** Scores, mask, softmax and weighted sum, computed by each head. */
  perHead: Box[];
  output: Box;
}

export function buildAttentionSteps(context: Context, name: "attn" | "cross"): AttentionSteps {
  const stack = stackOf(context);
  const kind = kindOf(context);
  const sizes = kind[name] as AttentionSizes;
  const site = `${stack.prefix}blocks.${context.block}.${name}`;
  const matrices = stack.blocks[context.block]?.sublayers[name]?.matrices ?? [];
  const [T, S] = [lengthLetter(context), name === "cross" ? "S" : lengthLetter(context)];
  const step = (id: string, title: string, shape: string, about: string, extra: Partial<Box> = {}): Box => ({
    id: `${stack.prefix}${name}.${id}`, kind: "step", title, shape, about, formulas: kind.formulas[`${name}.${id}`] ?? [], facts: [], links: traceLinks(context, `${site}.${id}`), ...extra,
  }); // prettier-ignore
  const find = (prefix: string): Matrix[] => matrices.filter((matrix) => matrix.name === prefix || matrix.name.startsWith(`${prefix}.`));
  const project = (id: string, title: string, matrixName: string, shape: string, about: string): Box => {
    const found = find(matrixName);
    return step(id, title, shape, about, { kind: "attn", note: found.map(matrixSizes).join(", "), parameters: found.reduce((sum, matrix) => sum + matrix.parameters, 0), facts: found.map((matrix) => [`matrix ${matrix.name}`, matrixSizes(matrix)]) });
  };
  const [d, heads] = [formatInteger(context.architecture.d_model), sizes.heads];
  const shapeOf = (letter: string, number: number, width: number): string => `${letter} × ${number} × ${formatInteger(width)}`;
  const query = project("q", "Queries", "q", shapeOf(T, heads, sizes.d_head), `A linear layer computes one query of ${sizes.d_head} numbers per token and head. A query is compared with the keys of all visible tokens.`);
  const keyText = "one key per token and key-value head. The product of a query and a key is the score of this pair of tokens.";
  const valueText = "one value per token and key-value head. The output of a head is a weighted sum of values.";
  const projections =
    sizes.kind === "latent"
      ? [[query], [project("kv_down", "Latent", "kv_down", `${S} × ${formatInteger(sizes.kv_rank ?? 0)}`, "A linear layer compresses each token's vector to a latent from which keys and values of all heads are computed. Only the latent and the rotated part of the key are cached."), project("kv_up", "Keys and values", "kv_up", shapeOf(S, heads, sizes.d_head), "A linear layer computes keys and values of all heads from the latent.")]]
      : [
          [query],
          [project("k", "Keys", "k", shapeOf(S, sizes.kv_heads, sizes.d_head), `A linear layer computes ${keyText}`)],
          [project("v", "Values", "v", shapeOf(S, sizes.kv_heads, sizes.d_value), `A linear layer computes ${valueText}`)],
        ];
  const prepared: Box[] = [];
  if (sizes.has_qk_norm) prepared.push(step("qk_norm", "QK-norm", shapeOf(T, heads, sizes.d_head), "A norm is applied to queries and keys before their product, which limits the size of the scores.", { kind: "norm" }));
  if (sizes.position === "rope" && name === "attn") prepared.push(step("position", "RoPE", shapeOf(T, heads, sizes.d_head), `Queries and keys are rotated by angles proportional to their position${sizes.rotary_dim && sizes.rotary_dim < sizes.d_head ? ` (${sizes.rotary_dim} of ${sizes.d_head} dimensions)` : ""}. So their product depends on the distance of the two tokens.`));
  const bias = name === "attn" && ["alibi", "relative-bias"].includes(sizes.position) ? ` A bias that depends on the distance (${positionName(sizes.position)}) is added.` : name === "attn" && sizes.position === "disentangled" ? " Scores of q and k with projected relative position embeddings are added." : "";
  const isCausal = stack.is_causal && name === "attn";
  const perHead = [
    step("scores", "Scores: q · k / √d", `${heads} × ${T} × ${S}`, `The score of a query and a key is their dot product, divided by the square root of the head dimension ${sizes.d_head}.${sizes.softcap ? ` A softcap limits it to ±${sizes.softcap}.` : ""}${bias}`, { note: [`√${sizes.d_head} = ${Math.sqrt(sizes.d_head).toFixed(2)}`, bias ? `+ ${positionName(sizes.position)}` : "", sizes.softcap ? `softcap ${sizes.softcap}` : ""].filter(Boolean).join(", ") }),
    step("mask", isCausal ? "Causal mask" : sizes.window ? "Window mask" : "No mask", `${heads} × ${T} × ${S}`, isCausal ? `Scores of later tokens are set to −∞${sizes.window ? `, and so are those of tokens ${formatInteger(sizes.window)} or more positions before` : ""}, so that a prediction uses only the text before it.` : sizes.window ? "Scores outside the window are set to −∞." : name === "cross" ? "Every token of the encoder is visible." : "Every token is visible: the model is bidirectional.", { note: sizes.window ? `window ${formatInteger(sizes.window)}` : "" }),
    step("pattern", "Softmax", `${heads} × ${T} × ${S}`, `Softmax converts the scores of each query to attention weights: positive numbers whose sum is 1.${sizes.has_sink ? " A learned sink takes part in the sum but has no value." : ""}`, { links: [...traceLinks(context, `${site}.pattern`), { ...headLink(context, name, 0), label: "Pattern of head 0 in Attention" }] }),
    step("z", "Weighted sum of values", shapeOf(T, heads, sizes.d_value), "The output of a head is the sum of the values, each multiplied by its attention weight."),
  ];
  const inputs =
    name === "cross"
      ? [step("in", "Decoder", `T × ${d}`, "The input of the queries: the residual stream of the decoder."), step("memory", "Encoder output", `S × ${d}`, "The input of keys and values: the output of the encoder.", { kind: "output", formulas: [], links: [] })]
      : [step("in", "Input", `${T} × ${d}`, "The input of attention: one vector per token.")];
  const output = project("out", "Output projection", "o", `${T} × ${d}`, `The outputs of all ${heads} heads are concatenated (${formatInteger(heads * sizes.d_value)} numbers) and projected to ${d} numbers, which are added to the residual stream.`);
  return { inputs, projections, prepared, perHead, output };
}

export interface FfnSteps {
  before: Box[];
  /** Matrices and activation of the FFN, or of each expert. */
  inner: Box[][];
  after: Box[];
  /** Number of experts, drawn as a grid; 0 for a dense FFN. */
  experts: number;
  topK: number;
}

export function buildFfnSteps(context: Context): FfnSteps {
  const stack = stackOf(context);
  const kind = kindOf(context);
  const sizes = kind.ffn;
  const site = `${stack.prefix}blocks.${context.block}.ffn`;
  const matrices = stack.blocks[context.block]?.sublayers.ffn?.matrices ?? [];
  const T = lengthLetter(context);
  const [d, hidden] = [formatInteger(context.architecture.d_model), formatInteger(sizes.hidden)];
  const isMoe = sizes.kind === "moe";
  const step = (id: string, title: string, shape: string, about: string, siteName: string, extra: Partial<Box> = {}): Box => ({
    id: `${stack.prefix}ffn.${id}`, kind: "step", title, shape, about, formulas: kind.formulas[`ffn.${siteName}`] ?? [], facts: [], links: traceLinks(context, `${site}.${siteName}`), ...extra,
  }); // prettier-ignore
  const project = (id: string, title: string, matrixName: string, shape: string, about: string, siteName: string): Box => {
    const matrix = matrices.find((candidate) => candidate.name === matrixName);
    const extra = matrix ? { note: `${matrixSizes(matrix)}${isMoe && matrix.shape.length === 3 ? `, ${matrix.shape[0]} times` : ""}`, parameters: matrix.parameters, facts: [[`matrix ${matrix.name}`, matrixSizes(matrix)]] as Box["facts"] } : {};
    return step(id, title, shape, about, siteName, { kind: "ffn", ...extra });
  };
  const isGated = sizes.expert_kind !== "mlp";
  const of = isMoe ? "experts." : "";
  const up = project("up", "Up projection", `${of}up`, `${T} × ${hidden}`, `A linear layer expands each vector from ${d} to ${hidden} numbers.`, "hidden");
  const gate = project("gate", "Gate projection", `${of}gate`, `${T} × ${hidden}`, `A second linear layer computes a gate of ${hidden} numbers, to which the activation is applied.`, "hidden");
  const activation = step("hidden", isGated ? `${activationName(sizes.activation)}(gate) ⊙ up` : activationName(sizes.activation), `${T} × ${hidden}`, isGated ? `${activationName(sizes.activation)} is applied to the gate, and the result is multiplied elementwise with the up projection.` : `The activation function ${activationName(sizes.activation)} is applied to each number. Without it, the two matrices would be equivalent to one.`, "hidden");
  const down = project("down", "Down projection", `${of}down`, `${T} × ${d}`, `A linear layer projects the ${hidden} hidden numbers back to ${d}, which are added to the residual stream.`, "out");
  const input = step("in", "Input", `${T} × ${d}`, "The input of the FFN: one vector per token. Tokens are processed separately.", "in");
  const router = project("router", "Router", "router", `${T} × ${sizes.experts ?? 0}`, `The router computes one score per expert and selects the ${sizes.top_k} experts with the highest scores for each token.`, "router");
  const sum = step("out", "Weighted sum", `${T} × ${d}`, `The outputs of the ${sizes.top_k} selected experts are added with the weights of the router.${sizes.shared_hidden ? ` The output of the shared expert (hidden size ${formatInteger(sizes.shared_hidden)}) is added for every token.` : ""}`, "out", { note: sizes.shared_hidden ? "+ shared expert" : "" });
  const inner = [isGated ? [gate, up] : [up], [activation], [down]];
  return { before: isMoe ? [input, router] : [input], inner, after: isMoe ? [sum] : [], experts: sizes.experts ?? 0, topK: sizes.top_k ?? 0 };
}
