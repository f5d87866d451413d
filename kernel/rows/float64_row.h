// One row in float64, key by key: the fallback where products overflow, and where NaN or infinity reach a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "rows/arena.h"
#include "rows/dropout.h"
#include "rows/logits.h"
#include "rows/place.h"
#include "rows/visibility.h"
#include "simd/numbers.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class In>
struct Float64Row {
    const Problem& call;
    const RowPlace place;
    const int64_t number = place.number(call);  // among all rows
    const In* query = row_of<In>(call.q, place);
    const In* key = key_of<In>(call, call.k, place.head(call), 0);
    const In* value = key_of<In>(call, call.v, place.head(call), 0);
    const double scale = number_of(call.scale, place);
    const double* sink = sink_of(call, place);
    const RowBias bias{call, place};
    const RowDropout dropout{call.dropout, number};
    const KeyRange range = key_range(call, place.l);

    int64_t count = 0;        // visible keys
    int64_t* keys;            // which they are,
    double* products;         // their q.k,
    double *scores, *logits;  // that times the scale, and what softmax sees,
    double* cap_gradients;    // the derivative of the soft cap
    double* sums;             // [width], for the pass that uses the row
    bool poisoned = false;    // a logit is NaN

    // `stops`: from the first NaN on nothing but the keys is needed.
    Float64Row(const Problem& of, const RowPlace& at, int64_t width, bool stops)
        : call(of), place(at), memory_([&](Arena& memory) { lay_out(memory, width); }) {
        for (int64_t j = range.lo; ok() && j <= range.hi; ++j) {
            if (bias.hides(j)) continue;
            keys[count] = j;
            if (!(poisoned && stops)) measure(j);
            ++count;
        }
    }

    bool ok() const { return memory_.ok(); }

    static double multiply(const In* a, int64_t a_step, const In* b, int64_t b_step, int64_t width) {
        double product = 0;
        for (int64_t d = 0; d < width; ++d) product += double(widen(a[d * a_step])) * double(widen(b[d * b_step]));
        return product;
    }

    // sums += factor * row
    void add(double factor, const In* row, int64_t step, int64_t width) {
        for (int64_t d = 0; d < width; ++d) sums[d] += factor * double(widen(row[d * step]));
    }

    // The sums as an output has them.
    template <class Out>
    void write(int64_t width, Out* to) const {
        for (int64_t d = 0; d < width; ++d) to[d] = narrow(Working<Out>(sums[d]), Out());
    }

  private:
    void lay_out(Arena& memory, int64_t width) {
        const int64_t most = larger(range.hi - range.lo + 1, 0);
        memory.take(keys, most);
        memory.take(products, most);
        memory.take(scores, most);
        memory.take(logits, most);
        memory.take(cap_gradients, most);
        memory.take(sums, width);
    }

    void measure(int64_t j) {
        const double product = multiply(query, call.q.d, key + j * call.k.s, call.k.d, call.d_k);
        const double score = scale * product;
        const double squashed = call.softcap > 0 ? std::tanh(score / call.softcap) : 0.0;
        products[count] = product;
        scores[count] = score;
        cap_gradients[count] = 1.0 - squashed * squashed;
        logits[count] = (call.softcap > 0 ? call.softcap * squashed : score) + bias.of(j);
        poisoned = poisoned || logits[count] != logits[count];
    }

    const Arena memory_;
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
