// Steps of the guided tour, with the numbers of the open model.
import { activationName, formatInteger, formatParameters, positionName } from "./boxes";
import type { Architecture } from "./architecture";

export interface TourStep {
  /** Box of the diagram that is highlighted. */
  box: string;
  title: string;
  text: string;
}

const KEY = "cutaway.tour";

/** Whether the tour was finished or skipped before. True if the browser denies storage, so that it is not shown each time. */
export function wasTourSeen(): boolean {
  try {
    return localStorage.getItem(KEY) !== null;
  } catch {
    return true;
  }
}

export function rememberTour(): void {
  try {
    localStorage.setItem(KEY, "seen");
  } catch {
    return; // files and notebooks may have no storage
  }
}

interface TextFacts {
  numTokens: number;
  isUntrained: boolean;
  /** Predicted token with its probability; empty if the model has no head. */
  prediction: string;
}

export function buildTour(architecture: Architecture, stackName: string, { numTokens, isUntrained, prediction }: TextFacts): TourStep[] {
  const stack = architecture.stacks[stackName];
  const kind = stack?.block_kinds[0];
  if (!stack || !kind) return [];
  const { prefix } = stack;
  const { d_model: d, form, num_parameters: total } = architecture;
  const numBlocks = stack.blocks.length;
  const isEncoderDecoder = form === "encoder-decoder";
  const share = (count: number): string => `${Math.round((100 * count) / total)} % of the parameters`;
  const tokenParameters = Object.values(architecture.stacks).reduce((sum, { embedding }) => sum + embedding.token_parameters, 0);
  const ffnParameters = Object.values(architecture.stacks).flatMap(({ blocks }) => blocks).reduce((sum, { sublayers }) => sum + (sublayers.ffn?.parameters ?? 0), 0);
  const visible = stack.is_causal ? "itself and the tokens before it" : "all tokens of the text";
  const position = stack.embedding.position !== "none" ? ` A ${stack.embedding.position} position vector is added.` : kind.attn.position === "none" ? "" : ` Positions enter later, in attention (${positionName(kind.attn.position)}).`;
  const isShared = stack.blocks.some(({ shared_with }) => shared_with !== null);
  const output = architecture.head ? "head" : "hidden_states";
  return [
    { box: isEncoderDecoder ? "encoder.input" : `${prefix}input`, title: "Text to tokens", text: isUntrained ? `This model has random weights and no tokenizer, so each byte of the text is one token: ${formatInteger(numTokens)} tokens here.` : `The tokenizer splits the text into ${formatInteger(numTokens)} tokens. Each token has an id; the vocabulary has ${formatInteger(architecture.vocab_size)} tokens.` },
    { box: `${prefix}embed`, title: "Embedding", text: `Each token id selects a row of ${formatInteger(stack.embedding.table_dim)} numbers from the embedding table, which has ${formatParameters(tokenParameters)} parameters (${share(tokenParameters)}).${position}` },
    { box: `${prefix}attn`, title: "Attention", text: `${kind.attn.heads} heads compute, for each token, a weighted sum over ${visible}. Only here does the vector of a token depend on other tokens.${isEncoderDecoder ? " Cross-attention does the same with the tokens of the encoder." : ""}` },
    { box: `${prefix}ffn`, title: "Feed-forward network", text: kind.ffn.kind === "moe" ? `A router selects ${kind.ffn.top_k} of ${kind.ffn.experts} experts for each token. The FFNs have ${share(ffnParameters)}.` : `The FFN processes each token separately: ${formatInteger(d)} → ${formatInteger(kind.ffn.hidden)} → ${formatInteger(d)} numbers, with ${activationName(kind.ffn.activation)} in between. The FFNs of all blocks have ${share(ffnParameters)}.` },
    { box: `${prefix}blocks`, title: numBlocks === 1 ? "One block" : `Repeated ${numBlocks} times`, text: `Attention and FFN are one block. ${numBlocks === 1 ? "This model has one block." : `${numBlocks} blocks follow each other, ${isShared ? "all with the same weights" : "each with its own weights"}.`} Each adds its outputs to the residual stream, ${formatInteger(d)} numbers per token. ⤢ on attention or FFN opens the steps inside.` },
    { box: output, title: !architecture.head ? "Output" : form === "encoder" ? "Predicted token" : "Next token", text: architecture.head ? `The head computes a logit for each of the ${formatInteger(architecture.vocab_size)} tokens of the vocabulary, and softmax converts them to probabilities.${prediction ? ` Prediction for this text: ${prediction}.` : ""}${isUntrained ? " The weights are random, so the prediction is arbitrary." : ""}` : `This model has no head. Its output is a vector of ${formatInteger(d)} numbers per token.` },
  ];
}
