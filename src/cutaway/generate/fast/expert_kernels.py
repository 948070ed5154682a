"""Triton kernels of mixture-of-experts layers for few rows of x: routing, and FFNs that read only the selected experts.

Dimensions: M rows, E experts, TOP_K selected experts per row, M · TOP_K pairs (row, selected expert). Expert weights
are (E, N, K) for N outputs and K inputs. The first product of an expert computes h (pairs, N), the second one the
partial sums (TOP_K, M, N) of the layer's output, each multiplied by its routing weight.

A shared expert with SHARED times the hidden size of the others equals SHARED more experts with routing weight 1: with
one row they are the pairs from TOP_K on. In its second weight, (N, SHARED · K), their columns follow each other.
"""

import triton
import triton.language as tl

from cutaway.generate.fast.linear_kernels import apply_activation, pdl_wait


@triton.jit
def routing_kernel(
    logits_ptr, selection_bias_ptr, weight_ptr, expert_ptr, scale, E: tl.constexpr, TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr, SELECTION_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_TOP2: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: the TOP_K experts with the largest scores, from the best expert groups, and their routing weights.

    The score of a group is its largest score, or with GROUP_TOP2 the sum of its two largest."""
    row = tl.program_id(0)
    e = tl.arange(0, BE)
    mask = e < E
    pdl_wait(PDL)
    logits = tl.load(logits_ptr + row * E + e, mask=mask, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = tl.sigmoid(logits)
    choice = scores
    if SELECTION_BIAS:
        choice += tl.load(selection_bias_ptr + e, mask=mask, other=0.0).to(tl.float32)
    choice = tl.where(mask, choice, float("-inf"))
    if NUM_GROUPS > 0:
        group = e // (E // NUM_GROUPS)
        g = tl.arange(0, BG)
        group_scores = tl.full((BG,), float("-inf"), tl.float32)
        for i in tl.static_range(NUM_GROUPS):
            in_group = tl.where(group == i, choice, float("-inf"))
            score = tl.max(in_group, 0)
            if GROUP_TOP2:
                score += tl.max(tl.where(e == tl.argmax(in_group, 0), float("-inf"), in_group), 0)
            group_scores = tl.where(g == i, score, group_scores)
        selected = e < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(group_scores, 0)
            selected = selected | (group == best_group)
            group_scores = tl.where(g == best_group, float("-inf"), group_scores)
        choice = tl.where(selected, choice, float("-inf"))
    k = tl.arange(0, BK)
    weights = tl.zeros((BK,), tl.float32)
    experts = tl.zeros((BK,), tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        experts = tl.where(k == i, best, experts)
        weights = tl.where(k == i, tl.sum(tl.where(e == best, scores, 0.0), 0), weights)
        choice = tl.where(e == best, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weight_ptr + row * TOP_K + k, weights * scale, mask=k < TOP_K)
    tl.store(expert_ptr + row * TOP_K + k, experts, mask=k < TOP_K)


@triton.jit
def _apply_gate(gate, up, limit, alpha, ACT: tl.constexpr, CLAMPED: tl.constexpr):
    """act(gate) · up, or with CLAMPED gate · sigmoid(alpha · gate) · (up + 1) for values clamped to the limit."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        y = apply_activation(gate, ACT) * up
    return y


@triton.jit
def expert_gemv_kernel(
    x_ptr, w_ptr, up_ptr, shared_ptr, shared_up_ptr, y_ptr, bias_ptr, up_bias_ptr, expert_ptr, weight_ptr,
    norm_weight_ptr, eps, limit, alpha, N, K: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ACT: tl.constexpr, CLAMPED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x: BN outputs of one selected expert, or of a part of the shared expert, per program.

    FIRST: the first product, whose input is x for all experts, or its RMSNorm (NORM). Otherwise the second: x is h,
    (pairs, K), and the result is multiplied by the routing weight."""
    pair = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    n_mask = n < N
    pdl_wait(PDL)
    expert = (pair - TOP_K).to(tl.int64)
    if pair < TOP_K:
        expert = tl.load(expert_ptr + pair).to(tl.int64)
        row = expert * N + n
    else:
        w_ptr, up_ptr = shared_ptr, shared_up_ptr
        row = expert * N + n if FIRST else n.to(tl.int64) * SHARED + expert
    offset = row[:, None] * K + k[None, :]
    x_row = x_ptr if FIRST else x_ptr + pair * K
    acc = tl.zeros((BN, BK), tl.float32)
    sum_sq = tl.zeros((BK,), tl.float32)
    if GATED:
        acc_up = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=3):
        mask = n_mask[:, None] & (k0 + k < K)[None, :]
        x = tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        if NORM:  # 1/rms is a common factor of the sum and is applied at the end
            sum_sq += x * x
            gain = tl.load(norm_weight_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
            x *= gain + 1.0 if UNIT_OFFSET else gain
        w = tl.load(w_ptr + offset + k0, mask=mask, other=0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            w_up = tl.load(up_ptr + offset + k0, mask=mask, other=0, eviction_policy="evict_first")
            acc_up += w_up.to(tl.float32) * x[None, :]
    rstd = 1.0
    if NORM:
        rstd = tl.rsqrt(tl.sum(sum_sq, 0) / K + eps)
    y = tl.sum(acc, 1) * rstd
    if BIAS:
        y += tl.load(bias_ptr + expert * N + n, mask=n_mask, other=0.0).to(tl.float32)
    if GATED:
        y_up = tl.sum(acc_up, 1) * rstd
        if BIAS:
            y_up += tl.load(up_bias_ptr + expert * N + n, mask=n_mask, other=0.0).to(tl.float32)
        y = _apply_gate(y, y_up, limit, alpha, ACT, CLAMPED)
    elif FIRST:
        y = apply_activation(y, ACT)
    if not FIRST:
        y *= tl.load(weight_ptr + pair, mask=pair < TOP_K, other=1.0)
    tl.store(y_ptr + pair * N + n, y.to(y_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def expert_gemm_kernel(
    x_ptr, w_ptr, up_ptr, y_ptr, bias_ptr, up_bias_ptr, expert_ptr, weight_ptr, limit, alpha, M, N, K: tl.constexpr,
    TOP_K: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    CLAMPED: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Several rows: BN outputs of one expert for all pairs that selected it, with tensor cores. See expert_gemv_kernel.

    A program finds the pairs of its expert in the list of all; most programs of a small batch find none."""
    expert = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    p = tl.arange(0, BP)
    n_mask = n < N
    pdl_wait(PDL)
    is_selected = tl.load(expert_ptr + p, mask=p < M * TOP_K, other=-1) == expert
    count = tl.sum(is_selected.to(tl.int32), 0)
    if count > 0:
        rank = tl.cumsum(is_selected.to(tl.int32), 0) - 1
        offset = (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        for first in tl.range(0, count, BM):
            m = first + tl.arange(0, BM)
            m_mask = m < count
            # The pairs of the expert, in order: the one with rank m.
            pair = tl.sum(tl.where(is_selected[None, :] & (rank[None, :] == m[:, None]), p[None, :], 0), 1)
            x_row = (pair // TOP_K if FIRST else pair) * K
            acc = tl.zeros((BN, BM), tl.float32)
            if GATED:
                acc_up = tl.zeros((BN, BM), tl.float32)
            for k0 in tl.range(0, K, BK, num_stages=STAGES):
                k_mask = k0 + k < K
                mask = n_mask[:, None] & k_mask[None, :]
                x = tl.load(
                    x_ptr + x_row[None, :] + (k0 + k)[:, None], mask=m_mask[None, :] & k_mask[:, None], other=0.0
                )
                w = tl.load(w_ptr + offset + k0, mask=mask, other=0)
                acc = tl.dot(w, x, acc, input_precision="ieee" if EXACT else "tf32")
                if GATED:
                    w_up = tl.load(up_ptr + offset + k0, mask=mask, other=0)
                    acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee" if EXACT else "tf32")
            if BIAS:
                acc += tl.load(bias_ptr + expert * N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
            y = acc
            if GATED:
                if BIAS:
                    acc_up += tl.load(up_bias_ptr + expert * N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
                y = _apply_gate(acc, acc_up, limit, alpha, ACT, CLAMPED)
            elif FIRST:
                y = apply_activation(acc, ACT)
            y_row = pair
            if not FIRST:
                y *= tl.load(weight_ptr + pair, mask=m_mask, other=0.0)[None, :]
                y_row = pair % TOP_K * M + pair // TOP_K
            y_offset = y_row.to(tl.int64)[None, :] * N + n[:, None]
            tl.store(y_ptr + y_offset, y.to(y_ptr.dtype.element_ty), mask=n_mask[:, None] & m_mask[None, :])
