/* Parts of a softmax: each is a largest score m, a sum of exp(s - m) and a sum of exp(s - m) * v, and parts are joined
 * by weighing each with exp(m - M), M being the largest of all. Nothing seen: m = -inf and both sums 0. */
#ifndef PAGEDKERN_SOFTMAX_CUH
#define PAGEDKERN_SOFTMAX_CUH

#include "elements.cuh"

INLINE float exponential(float x) { return exp2f(x * 1.44269504f); }

/* What to subtract from scores whose largest is `top`: (-inf) - (-inf) must not arise. */
INLINE float base_of(float top) { return top == -infinity() ? 0.0f : top; }

INLINE float weight_of(float part_top, float top) { return exponential(part_top - base_of(top)); }

struct Final {
  float factor; /* of the weighted sum of values */
  float lse;
};

/* The end of a row: the sink of its head joins, if there is one, and the scale of V. */
INLINE Final finish(float top, float total, const pagedkern_attention_params &params, int head, int kv_head) {
  Final row;
  float share = 1.0f;
  if (params.sinks) {
    const float sink = params.sinks[head], all = fmaxf(top, sink);
    share = weight_of(top, all);
    total = total * share + (sink == infinity() ? 1.0f : weight_of(sink, all)); /* NaN of a NaN */
    top = all;
  }
  const float scale = params.v_scale ? params.v_scale[kv_head] : 1.0f;
  row.factor = total == 0.0f ? 0.0f : share * scale / total;
  row.lse = top + logf(total); /* -inf + -inf if nothing was seen */
  return row;
}

#endif /* PAGEDKERN_SOFTMAX_CUH */
