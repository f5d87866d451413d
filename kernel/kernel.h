// The whole contract of the kernel: plain structs in, status out. No Python, no torch, no exceptions across this line.
//
// Shape legend: N batch entries, G key/value heads, R query heads per key/value head, L queries, S keys, D = d_k, V =
// d_v, which may be 0.
#pragma once

#include <cstdint>

#include "row_statistics.h"

namespace sqrtdk {

enum class Dtype : int { float16, bfloat16, float32, float64 };
enum class MaskKind : int { none, boolean, float16, bfloat16, float32, float64 };
// How a call ended; with any other status than `ok` its results are incomplete.
enum class Status : int {
    ok,
    interrupted,    // Problem::interrupted said so
    out_of_memory,  // scratch memory was not to be had
    unknown_level,  // no level has this name, or this CPU cannot run it
    unknown_dtype,  // no Dtype has this number
    unknown_mask,   // no MaskKind has this number
};

// A strided array; strides count elements and may be zero or negative.
struct Query {  // [N, G, R, L, D]
    const void* data;
    int64_t n, g, r, l, d;
};
struct KeyValue {  // [N, G, S, D or V]
    const void* data;
    int64_t n, g, s, d;
};
struct Scale {  // float64 [N, G, R, L]; without data: none
    const double* data;
    int64_t n, g, r, l;
};
struct Mask {  // [N, G, R, L, S]; boolean is one byte, 0 hides; float is added to the logits, -inf hides
    MaskKind kind;
    const void* data;
    int64_t n, g, r, l, s;
};

// The fields of a call in the order in which they cross from Python, by kind and name: those of `Call` in call.py, and
// a module with others is not imported. An array is strided, or None.
#define SQRTDK_CALL_FIELDS(X) \
    X(array, query)           \
    X(array, key)             \
    X(array, value)           \
    X(array, scale)           \
    X(array, mask)            \
    X(array, sinks)           \
    X(array, alibi)           \
    X(integer, seed)          \
    X(number, factor) X(number, softcap) X(number, dropout) X(integer, first) X(integer, last) X(integer, offset)

// The arrays among them that are float64 and have one number per row, [N, G, R, L] when they are broadcast in full.
#define SQRTDK_ROW_NUMBERS(X) X(scale) X(alibi)

// Which weights are left out of the output: of row i and key j that with draw(seed, i, j) < probability * 2^32, a word
// of 32 bits (rows/dropout.h); the others grow by 1 / (1 - probability). Statistics, weights and sums are those before.
// Rows count [N, G, R, L], from first_row on where the call is a part of another.
struct Dropout {
    double probability = 0;  // 0: none
    int64_t seed = 0;
    int64_t first_row = 0;
};

// Runs body(data) on `threads` threads, the caller's among them, and returns when all have returned: the team of a
// runtime that the program has anyway, in place of the kernel's own threads. The signature is that of GOMP_parallel.
using Team = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Input of both passes: the arrays, the visible keys, and how the call is run.
struct Problem {
    Dtype dtype;
    int64_t batch, groups, shared, queries, keys, d_k, d_v;
    Query q;
    KeyValue k, v;
    Scale scale;
    Mask mask;
    // Query i sees key j with first <= j - i <= last; int64 limits leave a side open.
    int64_t first, last;
    double softcap;       // 0: none
    const double* sinks;  // [G * R], or null
    // ALiBi: slopes, and where the first query stands among the keys. slope * (j - i - offset) is added to the logits.
    Scale alibi = {};
    int64_t offset = 0;
    Dropout dropout;
    int threads;          // at least 1; the result does not depend on it
    Team team = nullptr;  // null: the kernel's own threads
    // Called by the calling thread every few milliseconds; true stops the call. May be null.
    bool (*interrupted)(void* context);
    void* context;
};

// Numbers of each row that the backward pass needs, contiguous [N, G, R, L], or null: the largest logit and the sum of
// exp(logit - max) over the visible keys, the sink left out. A row that sees nothing has -inf and 0. A row that the
// forward pass computed in float64, key by key, has a NaN for the sum: the backward pass does the same.
struct Saved {
    double* max;
    double* sum;
};

struct Forward : Problem {
    void* output;  // contiguous [N, G, R, L, V] of dtype
    Statistics statistics;
    void* weights;  // contiguous [N, G, R, L, S] of dtype, the sink in the denominator, 0 if not visible; or null
    Saved saved;
    float* exact;  // for 16-bit dtypes the output before it is rounded, which the backward pass starts from; or null
};

// The gradients that are given per row [N, G, R, L], in the order in which they cross:
// scale   <q, sum over keys of dscore * k>, defined at scale 0 too
// sinks   -p_sink * <grad_output, output>
// alibi   sum over keys of dlogit * (j - i - offset), defined without slopes too
#define SQRTDK_ROW_GRADIENTS(X) X(scale) X(sinks) X(alibi)

// Results of backward(); query, key and value contiguous and of the call's dtype, those per row contiguous or null.
struct Gradients {
    void* query;  // [N, G, R, L, D]
    void* key;    // [N, G, S, D], summed over the query heads that share the key
    void* value;  // [N, G, S, V]
#define SQRTDK_FIELD(name) double* name;
    SQRTDK_ROW_GRADIENTS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
};

struct Backward : Problem {
    Saved saved;         // of the forward pass; only read
    const void* output;  // of the forward pass, contiguous [N, G, R, L, V] of dtype; for 16-bit dtypes `exact`
    Query grad_output;   // [N, G, R, L, V] of dtype
    Gradients gradients;
};

// The statistics that a summary holds, in order: those of `SUMMARISED` in summary/heads.py; a module with others is not
// used for summaries.
#define SQRTDK_SUMMARISED(X) \
    X(entropy)               \
    X(entropy_ratio)         \
    X(saturation_index)      \
    X(max_weight)            \
    X(effective_keys)        \
    X(sum_p2)                \
    X(jacobian_trace)        \
    X(jacobian_norm)         \
    X(max_logit) X(logit_mean) X(logit_variance) X(score_max) X(score_variance) X(sink_weight) X(visible_keys)

// Rows [batch, heads, queries], contiguous, to be added up per head. Results are by statistic and head: HeadSummary in
// summary/heads.py says what they mean.
struct Summary {
    int64_t batch, heads, queries;
    Statistics rows;             // only read
    const uint8_t* present;      // [batch, queries], 0 leaves a row out; or null
    const int64_t* positions;    // of the queries among the keys [batch, queries]; or null
    int64_t keys;                // every max_key is below
    int64_t farthest;            // offsets that are counted one by one
    int64_t bins;                // of a histogram
    const double* next_edge;     // [bins]: the numbers of a bin are below
    const int16_t* edges_below;  // [2^16], by the upper half of a float32: the edges below all numbers that round to it
    int64_t* count;              // [statistics, heads], and so the next four
    double *mean, *m2, *least, *largest;
    int64_t* ends;       // [statistics * heads + 1]: where the entries of each group begin and end
    int16_t* filled;     // bins that are not empty, at most min(batch * queries, bins) of a group
    int64_t* numbers;    // how many numbers each of them has
    int64_t* offsets;    // [heads, 2 * farthest + 3]
    double* share_sum;   // [heads]
    int64_t* sequences;  // [heads]
    int threads;         // as in a Problem: the result does not depend on them
    Team team;
};
Status summarise(const Summary& call);

// Vectors [N, G, S, D] of one dtype, contiguous along D, whose lengths are added up per query head: of queries, with
// G = heads, and of keys.
struct Lengths {
    Dtype dtype;  // float32 or float64
    int64_t batch, heads, groups, queries, keys, d_k;
    KeyValue q, k;
    double scale;
    double width;  // by which squared key lengths are divided
    double* sums;  // [6, heads]: CauseSums in score_sums.py says what they mean
};
// False if a sum is not finite, or if memory was not to be had.
bool add_up_lengths(const Lengths& call);

// Run one pass on the named CPU level. Inputs are only read.
Status forward(const Forward& call, const char* level);
Status backward(const Backward& call, const char* level);

// CPU levels compiled in, best first, and whether this machine can run each.
struct Level {
    const char* name;
    bool runs_here;
};
const Level* levels(int* count);

// Machine probes for the benchmark: multiply-adds (float32) and bytes read per second on `threads` threads of the pool.
double probe_fma(const char* level, int threads);
double probe_read(const char* level, int threads);

// Worker threads alive now, the caller's left out.
int pool_size();

}  // namespace sqrtdk
