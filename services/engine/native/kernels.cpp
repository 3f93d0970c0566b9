// The loops of a decode step whose speed is the speed of the memory: plain functions over plain pointers, one thread.
// Arrays are named with their shape, name[rows, columns]. Weights and KV are float or bf16 (the upper half of a float's
// bits); everything else is float, and all arithmetic is float. A vector `vf` holds LANES floats, as wide as the machine
// has them; the compiler knows how to add and multiply those.
#include <algorithm>
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

static inline float sum(vf value) {
    for (int half = LANES / 2; half; half /= 2) {
        vi other;
        for (int i = 0; i < LANES; i++) other[i] = i ^ half;
        value += __builtin_shuffle(value, other);
    }
    return value[0];
}

union Bits { float value; uint32_t bits; };
// The sums of LANES vectors, as one. Each round halves their number: lane l adds two lanes of the first vector of a pair
// where l's bit `half` is clear, and two of the second where it is set.
static inline vf sums_of(vf *vectors) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) {
            vi low, high;
            for (int l = 0; l < LANES; l++) low[l] = (l & ~half) + (l & half ? LANES : 0), high[l] = low[l] + half;
            vf a = vectors[i], b = vectors[i + half];
            vectors[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
        }
    return vectors[0];
}

static inline float widen(float value) { return value; }
static inline float widen(bf16 value) { return Bits{.bits = (uint32_t)value << 16}.value; }

// PAIR values from memory are two vectors. Of bf16, the first has the values with even index and the second the odd
// ones: that costs a shift and a mask, where the natural order would cost two shuffles. `pack` orders the other
// operand alike.
static inline vf first_of(const float *at) { return load(at); }
static inline vf second_of(const float *at) { return load(at + LANES); }
static inline vf first_of(const bf16 *at) { return (vf)(*(const vu_any *)at << 16); }
static inline vf second_of(const bf16 *at) { return (vf)(*(const vu_any *)at & 0xffff0000u); }

template <class T> static int packed_index(int i) { return sizeof(T) == 4 ? i : i / PAIR * PAIR + i % 2 * LANES + i % PAIR / 2; }
template <class T> static void pack(const float *from, float *to, int n, float factor = 1) {
    int whole = n / PAIR * PAIR;
    for (int i = 0; i < n; i++) to[i < whole ? packed_index<T>(i) : i] = from[i] * factor;
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
    static thread_local std::vector<vf> kept[4];
    if (kept[which].size() * LANES < floats) kept[which].resize(floats / LANES + 1);
    return (float *)kept[which].data();
}

// N rows of weights against R packed rows of x, with N · R · S sums in registers. `ahead` is what the memory shall bring
// meanwhile: as many bytes as the N rows have, one linear stream.
template <class W, int N, int R, int S>
static void tile(const float *x, const W *w, const char *ahead, const float *bias, float *out, int n, int k, bool add) {
    vf sums[N][R][S] = {};
    int i = 0;
    for (; i + PAIR <= k; i += PAIR) {
        __builtin_prefetch(ahead + (size_t)i * N * sizeof(W));
        auto multiply = [&](int s, int shift, auto half_of) {
            vf weight[N];
            for (int j = 0; j < N; j++) weight[j] = half_of(w + (size_t)j * k + i);
            for (int r = 0; r < R; r++) {
                vf value = load(x + (size_t)r * k + i + shift);
#ifdef __x86_64__
                asm("" : "+x"(value));  // in a register, where the compiler would load it again for each use
#endif
                for (int j = 0; j < N; j++) sums[j][r][s] += weight[j] * value;
            }
        };
        multiply(0, 0, [](const W *at) { return first_of(at); });
        multiply(S - 1, LANES, [](const W *at) { return second_of(at); });
    }
    constexpr int ROUNDED = (N * R + LANES - 1) / LANES * LANES;
    vf vectors[ROUNDED] = {};
    float totals[ROUNDED];
    for (int j = 0; j < N; j++)
        for (int r = 0; r < R; r++) vectors[r * N + j] = S == 2 ? sums[j][r][0] + sums[j][r][1] : sums[j][r][0];
    for (int at = 0; at < ROUNDED && R > 3; at += LANES) store(totals + at, sums_of(vectors + at));
    for (int r = 0; r < R; r++)
        for (int j = 0; j < N; j++) {
            float total = R > 3 ? totals[r * N + j] : sum(vectors[r * N + j]);
            for (int t = i; t < k; t++) total += widen(w[(size_t)j * k + t]) * x[(size_t)r * k + t];
            float *to = out + (size_t)r * n + j;
            *to = total + (bias ? bias[j] : 0) + (add ? *to : 0);
        }
}

// `count` rows of weights against R packed rows of x. Few rows of x: the memory decides, and one row of weights at a
// time is the stream that it likes best. More: two at a time halve the loads of x.
template <class W, int R>
static void strip(const float *x, const W *w, size_t ahead, const float *bias, float *out, int count, int n, int k, bool add) {
    constexpr int N = R > 3 ? 2 : 1;
    int j = 0;
    for (; j + N <= count; j += N, w += (size_t)N * k, out += N, bias += bias ? N : 0)
        tile<W, N, R, 3 - N>(x, w, (const char *)w + ahead, bias, out, n, k, add);
    if (j < count) tile<W, 1, R, 1>(x, w, (const char *)w + ahead, bias, out, n, k, add);
}

// out[rows, n] = x[rows, k] · w[n, k]ᵀ + bias[n], added to what is there when `add`. The weights are read from memory
// once, as one linear stream: a panel of their rows meets all rows of x in the first-level cache while the next comes.
constexpr int MOST = 6, PANEL_BYTES = 8192;
template <class W>
static void linear(const float *x, const W *w, const float *bias, float *out, int rows, int n, int k, int add) {
    using Strip = void (*)(const float *, const W *, size_t, const float *, float *, int, int, int, bool);
    static constexpr Strip strips[MOST + 1] = {nullptr, strip<W, 1>, strip<W, 2>, strip<W, 3>, strip<W, 4>, strip<W, 5>, strip<W, 6>};
    float *packed = scratch(0, (size_t)rows * k);
    for (int r = 0; r < rows; r++) pack<W>(x + (size_t)r * k, packed + (size_t)r * k, k);
    int panel = std::max(2, PANEL_BYTES / (k * (int)sizeof(W)) & ~1);
    int blocks = (rows + MOST - 1) / MOST;
    for (int j = 0; j < n; j += panel)
        for (int block = 0; block < blocks; block++) {
            int r = rows * block / blocks, end = rows * (block + 1) / blocks;  // of nearly the same size
            strips[end - r](packed + (size_t)r * k, w + (size_t)j * k, r ? 0 : (size_t)panel * k * sizeof(W), bias ? bias + j : nullptr,
                            out + (size_t)r * n + j, n - j < panel ? n - j : panel, n, k, add);
        }
}

// scores[C] = query · keys[C, dim] for C tokens, `token` values apart; the query is packed.
template <class T, int C> static void dot_tokens(const float *query, const T *key, size_t token, float *scores, int dim) {
    vf sums[LANES] = {};
    for (int i = 0; i < dim; i += PAIR) {
        vf even = load(query + i), odd = load(query + i + LANES);
        for (int j = 0; j < C; j++) sums[j] += first_of(key + j * token + i) * even;
        for (int j = 0; j < C; j++) sums[j] += second_of(key + j * token + i) * odd;
    }
    vf totals = sums_of(sums);
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

// out[group, dim] += weights[group, C] · values[C, dim] for C tokens, `token` values apart. Packed results: each is read
// and written once for C products.
template <class T, int C>
static void add_tokens(float *out, const float *weights, size_t stride, const T *v, size_t token, int group, int dim) {
    for (int i = 0; i < dim; i += PAIR) {
        vf even[C], odd[C];
        for (int j = 0; j < C; j++) even[j] = first_of(v + j * token + i), odd[j] = second_of(v + j * token + i);
        for (int g = 0; g < group; g++) {
            float *to = out + g * dim + i;
            vf first = load(to), second = load(to + LANES);
            for (int j = 0; j < C; j++) first += even[j] * weights[g * stride + j];
            for (int j = 0; j < C; j++) second += odd[j] * weights[g * stride + j];
            store(to, first);
            store(to + LANES, second);
        }
    }
}

// Asks the memory for what probably comes next: heads are read one after the other, which is no stream that it sees.
template <class T> static void fetch(const T *from, size_t count) {
    for (size_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
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
    float *query = scratch(0, (size_t)heads * dim), *result = scratch(1, (size_t)heads * dim), *sums = scratch(3, heads);
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
            fetch(keys + where + count * token, count * token);
            for (int h = 0; h < heads; h++) {
                const T *key = keys + where + h / group * dim;
                float *to = scores + h * stride + first, *q_h = query + h * dim;
                int64_t i = 0;
                for (; i + LANES <= count; i += LANES) dot_tokens<T, LANES>(q_h, key + i * token, token, to + i, dim);
                for (; i < count; i++) dot_tokens<T, 1>(q_h, key + i * token, token, to + i, dim);
            }
        });
        for (int h = 0; h < heads; h++) sums[h] = soften(scores + h * stride, (int)(end - begin));
        std::fill(result, result + heads * dim, 0.0f);
        each_run([&](int64_t first, int64_t count, size_t where) {
            fetch(values + where + count * token, count * token);
            for (int h = 0; h < kv_heads; h++) {
                const T *value = values + where + h * dim;
                float *to = result + h * group * dim, *weights = scores + h * group * stride + first;
                int64_t i = 0;
                for (; i + 4 <= count; i += 4) add_tokens<T, 4>(to, weights + i, stride, value + i * token, token, group, dim);
                for (; i < count; i++) add_tokens<T, 1>(to, weights + i, stride, value + i * token, token, group, dim);
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

extern "C" {  // what is called from outside: pointers, because a template has no name there
extern const int pair = PAIR;
auto linear_f32 = linear<float>;
auto linear_bf16 = linear<bf16>;
auto attend_f32 = attend<float>;
auto attend_bf16 = attend<bf16>;
auto place_f32 = place<float>;
auto place_bf16 = place<bf16>;
auto rms_norm = norm;
}
