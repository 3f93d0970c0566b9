// A CPU's loops over weights and KV, for prompts and decode steps: plain functions over plain pointers, one thread.
// Arrays are named with their shape, name[rows, columns]. Weights and KV are float or bf16 (the upper half of a float's
// bits); everything else is float, and all arithmetic is float. A vector `vf` holds LANES floats, as wide as the machine
// has them; the compiler knows how to add and multiply those.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

constexpr int LANES = __BIGGEST_ALIGNMENT__ / 4;  // 16 with AVX-512, 8 with AVX, 4 with SSE and NEON
constexpr int PAIR = 2 * LANES;
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));  // of the same width, for masks and bits
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t bf16;
static inline vf load(const float *at) { return *(const vf_any *)at; }
static inline void store(float *at, vf value) { *(vf_any *)at = value; }
static inline vf same(float value) { return value - vf{}; }

static inline float sum(vf value) { float total = 0; for (int i = 0; i < LANES; i++) total += value[i]; return total; }

union Bits { float value; uint32_t bits; };
// The sums of 2 · HALF vectors of as many lanes, as one vector. A round halves their number: lane l adds two lanes of the
// first vector of a pair where l's bit HALF is clear, and two of the second where it is set.
template <int HALF> static inline vf sums_of(vf *vectors) {
    vi low, high;
    for (int l = 0; l < LANES; l++) low[l] = (l & ~HALF) + (l & HALF ? LANES : 0), high[l] = low[l] + HALF;
    for (int i = 0; i < HALF; i++) {
        vf a = vectors[i], b = vectors[i + HALF];
        vectors[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    }
    if constexpr (HALF > 1) return sums_of<HALF / 2>(vectors);
    return vectors[0];
}

// PAIR values from memory are two vectors. Of bf16, the first has the values with even index and the second the odd
// ones: that costs a shift and a mask, where the natural order would cost two shuffles. `pack` orders the other
// operand alike.
static inline vf first_of(const float *at) { return load(at); }
static inline vf second_of(const float *at) { return load(at + LANES); }
static inline vf first_of(const bf16 *at) { return (vf)(*(const vu_any *)at << 16); }
static inline vf second_of(const bf16 *at) { return (vf)(*(const vu_any *)at & 0xffff0000u); }

template <class T> static int packed_index(int i) { return sizeof(T) == 4 ? i : i / PAIR * PAIR + i % 2 * LANES + i % PAIR / 2; }
template <class T> static void pack(const float *from, float *to, int n, float factor) {
    for (int i = 0; i < n; i++) to[packed_index<T>(i)] = from[i] * factor;
}
template <class T> static void widen(const T *from, float *to, size_t n) {  // to floats in packed order
    for (size_t i = 0; i < n; i += PAIR) {
        __builtin_prefetch(from + i + n);  // as much again is probably next
        store(to + i, first_of(from + i)), store(to + i + LANES, second_of(from + i));
    }
}

static inline void narrow(float value, float *to) { *to = value; }
static inline void narrow(float value, bf16 *to) {  // to the nearest, ties to even; NaN stays NaN
    const uint32_t bits = Bits{value}.bits;
    *to = (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40 : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// exp(x) for x <= 0 to 2 units in the last place, and next to nothing below -87: 2^n · 2^f with a polynomial for 2^f on [-1/2, 1/2] (Cephes expf).
static inline vf exp_not_positive(vf x) {
    vf bounded = x < -87.0f ? same(-87.0f) : x;
    vi n = __builtin_convertvector(bounded * 1.44269504f - 0.5f, vi);  // truncation of a negative number: rounds to nearest
    vf whole = __builtin_convertvector(n, vf);
    vf f = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf p = ((same(1.9875691500e-4f) * f + 1.3981999507e-3f) * f + 8.3334519073e-3f) * f + 4.1665795894e-2f;
    p = (p * f + 1.6666665459e-1f) * f + 5.0000001201e-1f;
    return (p * f * f + f + 1.0f) * (vf)((n + 127) << 23);
}

static float *scratch(int which, size_t floats) {  // aligned for `vf`: a load over two cache lines costs two
    static thread_local std::vector<vf> kept[9];
    if (kept[which].size() * LANES < floats) kept[which].resize(floats / LANES + 1);
    return (float *)kept[which].data();
}

// R rows of x against PAIR outputs of a product, out[R, PAIR] = x[R, k] · w[k, PAIR] + bias[PAIR], added to what is there
// when `add`: all 2 · R sums stay in registers, and each is added up in the same order whatever R is. Rows lie `x_row`,
// `w_row` and `out_row` values apart. From `ahead` on, the memory shall bring `pace` bytes for each of the k meanwhile.
template <class W, int R>
static void tile(const float *x, size_t x_row, const W *w, size_t w_row, const char *ahead, int pace, const float *bias,
                 float *out, size_t out_row, int k, bool add) {
    vf sums[R][2] = {};
    for (int i = 0; i < k; i++, w += w_row, ahead += pace) {
        __builtin_prefetch(ahead);
        vf first = first_of(w), second = second_of(w);
        for (int r = 0; r < R; r++) {
            vf value = same(x[r * x_row + i]);
            sums[r][0] += first * value;
            sums[r][1] += second * value;
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            float *to = out + r * out_row + half * LANES;
            vf total = bias ? sums[r][half] + load(bias + half * LANES) : sums[r][half];
            store(to, add ? total + load(to) : total);
        }
}
constexpr int MOST = 6;
template <class W> constexpr auto tiles = std::array{tile<W, 1>, tile<W, 2>, tile<W, 3>, tile<W, 4>, tile<W, 5>, tile<W, 6>};

// out[rows, n] = x[rows, k] · w + bias[n], added to what is there when `add`. w[n / PAIR, k, PAIR] are the weights of
// PAIR outputs side by side (the last ones padded), so that a vector of them meets one value of x and no sum is left to
// be taken over a vector. They are read from memory once, as one linear stream: while all rows of x meet a panel in the
// cache, the next one comes; and for few rows, whose pace is the memory's, what is AHEAD.
constexpr int AHEAD_BYTES = 8192;
template <class W>
static void linear(const float *x, const W *w, const float *bias, float *out, int rows, int n, int k, int add) {
    size_t panel = (size_t)PAIR * k;
    int blocks = (rows + MOST - 1) / MOST;
    float *edge = scratch(0, MOST * PAIR);
    for (int j = 0; j < n; j += PAIR, w += panel)
        for (int block = 0; block < blocks; block++) {
            int r = (int64_t)rows * block / blocks, end = (int64_t)rows * (block + 1) / blocks;  // of nearly the same size
            size_t ahead = blocks == 1 ? AHEAD_BYTES : panel * sizeof(W) * (blocks + block) / blocks;
            int pace = (PAIR * sizeof(W) + blocks - 1) / blocks, whole = std::min(PAIR, n - j);
            float *to = out + (size_t)r * n + j;
            auto run = tiles<W>[end - r - 1];
            if (whole == PAIR) {
                run(x + (size_t)r * k, k, w, PAIR, (const char *)w + ahead, pace, bias ? bias + j : nullptr, to, n, k, add);
                continue;
            }
            run(x + (size_t)r * k, k, w, PAIR, (const char *)w, 0, nullptr, edge, PAIR, k, false);
            for (int i = 0; i < (end - r) * whole; i++) {
                float *at = to + (size_t)(i / whole) * n + i % whole;
                *at = edge[i / whole * PAIR + i % whole] + (bias ? bias[j + i % whole] : 0) + (add ? *at : 0);
            }
        }
}

// scores[C] = query · keys[C, dim] for C tokens, `token` values apart; both are packed.
template <int C> static void dot_tokens(const float *query, const float *key, size_t token, float *scores, int dim) {
    vf sums[LANES] = {};
    for (int i = 0; i < dim; i += LANES) {
        vf value = load(query + i);
        for (int j = 0; j < C; j++) sums[j] += load(key + j * token + i) * value;
    }
    vf totals = sums_of<LANES / 2>(sums);
    for (int j = 0; j < C; j++) scores[j] = totals[j];
}

// Scores to weights, in place; returns their sum. scores[n], padded to a whole vector.
static float soften(float *scores, int n) {
    vf largest = same(-INFINITY), total = {};
    for (int i = n; i % LANES; i++) scores[i] = -INFINITY;
    for (int i = 0; i < n; i += LANES) largest = load(scores + i) > largest ? load(scores + i) : largest;
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = fmaxf(most, largest[i]);
    for (int i = 0; i < n; i += LANES) {
        vf weight = exp_not_positive(load(scores + i) - most);
        store(scores + i, weight);
        total += weight;
    }
    return sum(total);
}

// Attention of one query token of each of `rows` sequences over keys and values [blocks, block_tokens, kv_heads, dim].
// q[rows, heads, dim] with `q_stride` floats between rows; out[rows, heads, dim], dense. A sequence's blocks are
// tables[starts[row]] …; its token sees positions [max(0, length − window), length); window 0: all of them.
template <class T>
static void attend(const float *q, int64_t q_stride, const T *keys, const T *values, const int64_t *tables,
                   const int64_t *starts, const int64_t *lengths, float *out, int rows, int heads, int kv_heads, int dim,
                   int block_tokens, int64_t window, float scale) {
    int group = heads / kv_heads;
    size_t token = (size_t)kv_heads * dim;
    float *query = scratch(0, (size_t)heads * dim), *result = scratch(1, (size_t)heads * dim);
    float *wide = scratch(3, block_tokens * token + heads), *sums = wide + block_tokens * token;
    for (int r = 0; r < rows; r++) {
        int64_t end = lengths[r], begin = window && end > window ? end - window : 0;
        const int64_t *table = tables + starts[r];
        size_t stride = (size_t)(end - begin + LANES - 1) / LANES * LANES;
        float *scores = scratch(2, heads * stride);
        for (int h = 0; h < heads; h++) pack<T>(q + r * q_stride + h * dim, query + h * dim, dim, scale);
        auto each_run = [&](auto visit) {  // tokens that lie one after the other: (first, how many, where in the arena)
            for (int64_t t = begin, stop; t < end; t = stop) {
                stop = std::min((t / block_tokens + 1) * block_tokens, end);
                visit(t - begin, stop - t, ((size_t)table[t / block_tokens] * block_tokens + t % block_tokens) * token);
            }
        };
        each_run([&](int64_t first, int64_t count, size_t where) {
            widen<T>(keys + where, wide, count * token);
            for (int h = 0; h < heads; h++) {
                float *to = scores + h * stride + first, *key = wide + h / group * dim;
                int64_t i = 0;
                for (; i + LANES <= count; i += LANES) dot_tokens<LANES>(query + h * dim, key + i * token, token, to + i, dim);
                for (; i < count; i++) dot_tokens<1>(query + h * dim, key + i * token, token, to + i, dim);
            }
        });
        for (int h = 0; h < heads; h++) sums[h] = soften(scores + h * stride, (int)(end - begin));
        std::fill(result, result + heads * dim, 0.0f);
        each_run([&](int64_t first, int64_t count, size_t where) {
            for (int h = 0, many; h < heads; h += many) {
                many = std::min(MOST, group - h % group);  // heads that share a KV head
                for (int i = h / group * dim, last = i + dim, to = h * dim; i < last; i += PAIR, to += PAIR) {
                    const char *next = (const char *)(values + where + count * (token + i));  // as much again, in as many parts
                    tiles<T>[many - 1](scores + h * stride + first, stride, values + where + i, token, next, PAIR * sizeof(T),
                                       nullptr, result + to, dim, (int)count, true);
                }
            }
        });
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < dim; i++)
                out[((size_t)r * heads + h) * dim + i] = end ? result[h * dim + packed_index<T>(i)] / sums[h] : 0;
    }
}

// Rotates the queries and keys of qkv[rows, heads + 2 · kv_heads, dim] in place by cosine[rows, dim / 2] and
// sine[rows, dim / 2] (halves, as Llama does), and writes keys and values to their slots of the arena's layer.
template <class T>
static void place(float *qkv, const float *cosine, const float *sine, const int64_t *slots, T *keys, T *values, int rows,
                  int heads, int kv_heads, int dim) {
    int half = dim / 2;
    for (int r = 0; r < rows; r++) {
        float *row = qkv + (size_t)r * (heads + 2 * kv_heads) * dim;
        const float *c = cosine + (size_t)r * half, *s = sine + (size_t)r * half;
        for (float *head = row; head < row + (heads + kv_heads) * dim; head += dim)
            for (int i = 0; i < half; i++) {
                float a = head[i], b = head[i + half];
                head[i] = a * c[i] - b * s[i];
                head[i + half] = b * c[i] + a * s[i];
            }
        const float *k = row + heads * dim, *v = k + kv_heads * dim;
        size_t to = (size_t)slots[r] * kv_heads * dim;
        for (int i = 0; i < kv_heads * dim; i++) narrow(k[i], keys + to + i), narrow(v[i], values + to + i);
    }
}

// Root mean square norm of each of `groups` runs of n values in each row: out = x / sqrt(mean(x²) + epsilon) · weight.
// x and out have `stride` floats between rows; they may be the same.
static void norm(const float *x, const float *weight, float *out, int rows, int64_t x_stride, int64_t out_stride, int groups, int n, float epsilon) {
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            const float *from = x + r * x_stride + (size_t)g * n;
            float *to = out + r * out_stride + (size_t)g * n;
            vf squares = {};
            int i = 0;
            for (; i + LANES <= n; i += LANES) squares += load(from + i) * load(from + i);
            float total = sum(squares);
            for (; i < n; i++) total += from[i] * from[i];
            float factor = 1.0f / sqrtf(total / n + epsilon);
            for (i = 0; i < n; i++) to[i] = from[i] * factor * weight[i];
        }
}

// out[rows, n] = silu(x[rows, :n]) · x[rows, n:], where silu(g) = g / (1 + exp(−g)). n is at least LANES: the last vector
// may overlap the one before.
static void gate(const float *x, float *out, int rows, int n) {
    for (int r = 0; r < rows; r++, x += 2 * n, out += n)
        for (int i = 0; i < n; i += LANES) {
            int at = std::min(i, n - LANES);
            vf g = load(x + at), small = exp_not_positive(g < 0 ? g : -g);
            store(out + at, (g < 0 ? g * small : g) / (small + 1.0f) * load(x + n + at));
        }
}

// Where the weights and the KV of a layer are; those that a model does not have are null.
struct Layer {
    const float *input_norm; const void *qkv; const float *qkv_bias, *query_norm, *key_norm;
    const void *output; const float *output_bias, *mlp_norm; const void *gate_up, *down; void *keys, *values;
};

// All layers of a step in which each of `rows` sequences has one new token, x[rows, hidden], in one call: what happens
// between the products would take longer than they do, were each of them called from outside.
template <class T>
static void layers(float *x, const Layer *layer, const float *cosine, const float *sine, const int64_t *slots, const int64_t *tables,
                   const int64_t *starts, const int64_t *lengths, int count, int rows, int hidden, int heads, int kv_heads, int dim,
                   int inner, int block_tokens, float epsilon, float scale) {
    int wide = (heads + 2 * kv_heads) * dim;
    float *normed = scratch(4, (size_t)rows * hidden), *qkv = scratch(5, (size_t)rows * wide), *attended = scratch(6, (size_t)rows * heads * dim);
    float *up = scratch(7, (size_t)rows * 2 * inner), *gated = scratch(8, (size_t)rows * inner);
    for (const Layer *end = layer + count; layer < end; layer++) {
        norm(x, layer->input_norm, normed, rows, hidden, hidden, 1, hidden, epsilon);
        linear(normed, (const T *)layer->qkv, layer->qkv_bias, qkv, rows, wide, hidden, false);
        if (layer->query_norm) norm(qkv, layer->query_norm, qkv, rows, wide, wide, heads, dim, epsilon);
        if (layer->key_norm) norm(qkv + heads * dim, layer->key_norm, qkv + heads * dim, rows, wide, wide, kv_heads, dim, epsilon);
        place(qkv, cosine, sine, slots, (T *)layer->keys, (T *)layer->values, rows, heads, kv_heads, dim);
        attend(qkv, wide, (const T *)layer->keys, (const T *)layer->values, tables, starts, lengths, attended, rows, heads, kv_heads,
               dim, block_tokens, 0, scale);
        linear(attended, (const T *)layer->output, layer->output_bias, x, rows, hidden, heads * dim, true);
        norm(x, layer->mlp_norm, normed, rows, hidden, hidden, 1, hidden, epsilon);
        linear<T>(normed, (const T *)layer->gate_up, nullptr, up, rows, 2 * inner, hidden, false);
        gate(up, gated, rows, inner);
        linear<T>(gated, (const T *)layer->down, nullptr, x, rows, hidden, inner, true);
    }
}

extern "C" {  // what is called from outside: pointers, because a template has no name there
extern const int pair = PAIR;
auto linear_f32 = linear<float>; auto linear_bf16 = linear<bf16>;
auto attend_f32 = attend<float>; auto attend_bf16 = attend<bf16>;
auto place_f32 = place<float>; auto place_bf16 = place<bf16>;
auto layers_f32 = layers<float>; auto layers_bf16 = layers<bf16>;
auto rms_norm = norm; auto silu_gate = gate;
}
