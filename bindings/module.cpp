// Arrays to structs, the GIL released, errors raised; no maths. Arguments are checked in Python before they come here.
//
// Arrays cross by the buffer protocol for speed alone: 28 ns an array, against 79 ns (151 ns if read-only) for
// nb::ndarray with nanobind 3.1 and NumPy 2.4, that is 0.2 to 0.5 us of a call that takes 4.4. Both take any strides.
// bfloat16, which has no buffer format, comes as a view of uint16.
#include <nanobind/nanobind.h>

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "arrays.h"
#include "kernel.h"

namespace {

constexpr double small_call = 1 << 16;  // multiply-adds; a double, as their number may pass int64

sqrtdk::Statistics statistics_at(double* measures, int64_t* counts, int64_t all_rows, int64_t first_row) {
    if (!measures) {
        return {};
    }
    sqrtdk::Statistics to;
    int64_t at = first_row;
#define SQRTDK_FIELD(name) to.name = counts + at, at += all_rows;
    SQRTDK_ROW_COUNTS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
    at = first_row;
#define SQRTDK_FIELD(name) to.name = measures + at, at += all_rows;
    SQRTDK_ROW_MEASURES(SQRTDK_FIELD)
#undef SQRTDK_FIELD
    return to;
}

// Asks for the GIL by `take`. At the end of the interpreter Python ends a daemon thread that asks for it, by unwinding
// its stack (newer versions let it wait for ever); nanobind's frames and destructors do not survive that and the
// process would abort. So the thread waits here until the process is gone.
template <class Take>
void take_gil(Take take) noexcept {
    try {
        take();
    } catch (...) {
        for (;;) {
            pause();
        }
    }
}

// The GIL is free as long as this lives.
class ReleasedGil {
  public:
    ReleasedGil() : thread_(PyEval_SaveThread()) {}
    ~ReleasedGil() {
        take_gil([this] { PyEval_RestoreThread(thread_); });
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

  private:
    PyThreadState* const thread_;
};

// Ctrl-C is looked for twenty times a second: taking the GIL more often would wait for other Python threads each time.
class Interrupts {
  public:
    static bool poll(void* context) {
        Interrupts& self = *static_cast<Interrupts*>(context);
        const auto now = std::chrono::steady_clock::now();
        // Where the interpreter has ended, what a thread would ask for the GIL with may be gone, and nobody interrupts.
        if (now < self.next_ || !Py_IsInitialized()) {
            return self.raised_;
        }
        PyGILState_STATE before{};
        take_gil([&before] { before = PyGILState_Ensure(); });
        self.raised_ = self.raised_ || PyErr_CheckSignals() != 0;
        PyGILState_Release(before);
        self.next_ = std::chrono::steady_clock::now() + interval;
        return self.raised_;
    }

  private:
    static constexpr std::chrono::milliseconds interval{50};
    std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + interval;
    bool raised_ = false;
};

void raise_unless_ok(sqrtdk::Status status, const char* level) {
    switch (status) {
        case sqrtdk::Status::ok: return;
        case sqrtdk::Status::interrupted:  // PyErr_CheckSignals has set the exception
            throw nb::python_error();
        case sqrtdk::Status::out_of_memory: PyErr_NoMemory(); throw nb::python_error();
        case sqrtdk::Status::unknown_dtype: throw nb::value_error("the kernel has no such dtype");
        case sqrtdk::Status::unknown_mask: throw nb::value_error("the kernel has no such kind of mask");
        case sqrtdk::Status::unknown_level:
            PyErr_Format(PyExc_RuntimeError, "the kernel has no level '%s' that runs here", level);
            throw nb::python_error();
    }
}

// Runs every round of a call; `run` gets the round's number and the problem with its arrays moved there.
template <class Run>
void run_rounds(const Inputs& inputs, const char* level, const Run& run) {
    Interrupts interrupts;
    sqrtdk::Problem part = inputs.problem;
    part.interrupted = &Interrupts::poll;
    part.context = &interrupts;
    sqrtdk::Status status = sqrtdk::Status::ok;
    {
        // A call of a few microseconds is over before another thread could have used the GIL.
        std::optional<ReleasedGil> released;
        if (inputs.size() > small_call) {
            released.emplace();
        }
        for (int64_t round = 0; round < inputs.rounds && status == sqrtdk::Status::ok; ++round) {
            const int64_t grad_output_at = inputs.enter(round, part);
            status = run(round, part, grad_output_at);
            if (status == sqrtdk::Status::ok && inputs.rounds > 1 && Interrupts::poll(&interrupts)) {
                status = sqrtdk::Status::interrupted;
            }
        }
    }
    raise_unless_ok(status, level);
}

// Rows of float64 [2, rows of all rounds]: maxima, then sums.
sqrtdk::Saved saved_at(const View& saved, int64_t all_rows, int64_t first_row) {
    double* const data = static_cast<double*>(saved.data());
    return {moved(data, first_row), moved(data, all_rows + first_row)};
}

void* part_of(const View& array, int64_t bytes) { return const_cast<void*>(moved_bytes(array.data(), bytes)); }

constexpr int writable = PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS;

// How a pass is run and the fields of its call, as parameters and as what they are packed into.
#define SQRTDK_DECLARE(kind, name) kind name,
#define SQRTDK_NAME(kind, name) name,
#define SQRTDK_PARAMETERS \
    const char *level, int threads, uintptr_t team, int dtype, int mask_kind, SQRTDK_CALL_FIELDS(SQRTDK_DECLARE)
#define SQRTDK_ARGUMENTS {level, threads, team, dtype, mask_kind, SQRTDK_CALL_FIELDS(SQRTDK_NAME)}

// False if an array is not aligned to its elements: the caller copies it and comes back.
bool forward(SQRTDK_PARAMETERS nb::handle output_array, nb::handle measures_array, nb::handle counts_array,
             nb::handle weights_array, nb::handle saved_array, nb::handle exact_array) {
    const Inputs inputs(SQRTDK_ARGUMENTS);
    const View output(output_array, writable), measures(measures_array, writable), counts(counts_array, writable);
    const View weights(weights_array, writable), saved(saved_array, writable), exact(exact_array, writable);
    if (!inputs.are_aligned()) {
        return false;
    }
    const int64_t rows = inputs.rows, item = inputs.item, all_rows = inputs.rounds * rows;
    run_rounds(inputs, level, [&](int64_t round, const sqrtdk::Problem& part, int64_t) {
        sqrtdk::Forward call;
        static_cast<sqrtdk::Problem&>(call) = part;
        call.output = part_of(output, round * rows * part.d_v * item);
        call.statistics = statistics_at(static_cast<double*>(measures.data()), static_cast<int64_t*>(counts.data()),
                                        all_rows, round * rows);
        call.weights = part_of(weights, round * rows * part.keys * item);
        call.saved = saved_at(saved, all_rows, round * rows);
        call.exact = moved(static_cast<float*>(exact.data()), round * rows * part.d_v);
        return sqrtdk::forward(call, level);
    });
    return true;
}

// False if an array is not aligned to its elements. The gradients of k and v are those of arrays with q's leading axes.
#define SQRTDK_ROWS(name) , nb::handle name##_rows
bool backward(SQRTDK_PARAMETERS nb::handle saved_array, nb::handle output_array, nb::handle grad_output_array,
              nb::handle query_array, nb::handle key_array, nb::handle value_array SQRTDK_ROW_GRADIENTS(SQRTDK_ROWS)) {
    const View grad_output(grad_output_array), saved(saved_array, PyBUF_C_CONTIGUOUS);
    const View output(output_array, PyBUF_C_CONTIGUOUS);
    const View to_query(query_array, writable), to_key(key_array, writable), to_value(value_array, writable);
#define SQRTDK_VIEW(name) const View to_##name(name##_rows, writable);
    SQRTDK_ROW_GRADIENTS(SQRTDK_VIEW)
    const Inputs inputs(SQRTDK_ARGUMENTS, &grad_output);
    if (!inputs.are_aligned() || !grad_output.is_aligned()) {
        return false;
    }
    const int64_t rows = inputs.rows, item = inputs.item;
    // The output of 16-bit calls comes as it was before it was rounded.
    const int64_t output_item = item == 2 ? int64_t(sizeof(float)) : item;
    const int64_t keys = inputs.problem.batch * inputs.problem.groups * inputs.problem.keys;
    run_rounds(inputs, level, [&](int64_t round, const sqrtdk::Problem& part, int64_t grad_output_at) {
        sqrtdk::Backward call;
        static_cast<sqrtdk::Problem&>(call) = part;
        call.saved = saved_at(saved, inputs.rounds * rows, round * rows);
        call.output = part_of(output, round * rows * part.d_v * output_item);
        call.grad_output = inputs.query(grad_output);
        call.grad_output.n = inputs.grad_output_n;
        call.grad_output.data = moved_bytes(grad_output.data(), grad_output_at * item);
        call.gradients.query = part_of(to_query, round * rows * part.d_k * item);
        call.gradients.key = part_of(to_key, round * keys * part.d_k * item);
        call.gradients.value = part_of(to_value, round * keys * part.d_v * item);
#define SQRTDK_PART(name) call.gradients.name = moved(static_cast<double*>(to_##name.data()), round * rows);
        SQRTDK_ROW_GRADIENTS(SQRTDK_PART)
        return sqrtdk::backward(call, level);
    });
    return true;
}

// Adds up rows per head. Arrays are contiguous and of the dtypes of sqrtdk::Summary; counts and measures are [., B, H,
// L].
void summarise(int threads, uintptr_t team, nb::handle counts_array, nb::handle measures_array,
               nb::handle present_array, nb::handle positions_array, int64_t keys, int64_t farthest,
               nb::handle next_edge_array, nb::handle edges_below_array, nb::handle count_array,
               nb::handle moments_array, nb::handle ends_array, nb::handle filled_array, nb::handle numbers_array,
               nb::handle offsets_array, nb::handle share_sum_array, nb::handle sequences_array) {
    constexpr int readable = PyBUF_C_CONTIGUOUS;
    const View counts(counts_array, readable), measures(measures_array, readable), present(present_array, readable);
    const View positions(positions_array, readable), next_edge(next_edge_array, readable);
    const View edges_below(edges_below_array, readable), count(count_array, writable), moments(moments_array, writable);
    const View ends(ends_array, writable), filled(filled_array, writable), numbers(numbers_array, writable);
    const View offsets(offsets_array, writable), share_sum(share_sum_array, writable);
    const View sequences(sequences_array, writable);
    const int64_t batch = counts.size(3), heads = counts.size(2), queries = counts.size(1);
    const int64_t groups = count.size(1) * count.size(2);
    double* const first = static_cast<double*>(moments.data());  // [4, statistics, heads]
    const sqrtdk::Summary call{
        batch,
        heads,
        queries,
        statistics_at(static_cast<double*>(measures.data()), static_cast<int64_t*>(counts.data()),
                      batch * heads * queries, 0),
        static_cast<const uint8_t*>(present.data()),
        static_cast<const int64_t*>(positions.data()),
        keys,
        farthest,
        next_edge.size(1),
        static_cast<const double*>(next_edge.data()),
        static_cast<const int16_t*>(edges_below.data()),
        static_cast<int64_t*>(count.data()),
        first,
        first + groups,
        first + 2 * groups,
        first + 3 * groups,
        static_cast<int64_t*>(ends.data()),
        static_cast<int16_t*>(filled.data()),
        static_cast<int64_t*>(numbers.data()),
        static_cast<int64_t*>(offsets.data()),
        static_cast<double*>(share_sum.data()),
        static_cast<int64_t*>(sequences.data()),
        threads,
        reinterpret_cast<sqrtdk::Team>(team),
    };
    sqrtdk::Status status;
    {
        const ReleasedGil released;
        status = sqrtdk::summarise(call);
    }
    raise_unless_ok(status, "");
}

// Adds up the lengths of vectors [B, H, L, D] and [B, G, S, D]; False if the sums are not finite, or if the vectors are
// not contiguous numbers of float32 or float64.
bool add_up_lengths(int dtype, nb::handle queries_array, nb::handle keys_array, double scale, double width,
                    nb::handle sums_array) {
    const View q(queries_array), k(keys_array), sums(sums_array, writable);
    const auto strided = [](const View& x) {
        return sqrtdk::KeyValue{x.data(), x.stride(4), x.stride(3), x.stride(2), x.stride(1)};
    };
    const sqrtdk::Lengths call{
        sqrtdk::Dtype(dtype),
        q.size(4),
        q.size(3),
        k.size(3),
        q.size(2),
        k.size(2),
        q.size(1),
        strided(q),
        strided(k),
        scale,
        width,
        static_cast<double*>(sums.data()),
    };
    const bool is_dense = q.size(1) == 1 || (call.q.d == 1 && call.k.d == 1);
    const bool is_known = call.dtype == sqrtdk::Dtype::float32 || call.dtype == sqrtdk::Dtype::float64;
    if (!is_dense || !is_known || !q.is_aligned() || !k.is_aligned()) {
        return false;
    }
    const ReleasedGil released;
    return sqrtdk::add_up_lengths(call);
}

nb::tuple make_tuple(std::initializer_list<const char*> names) {
    nb::list result;
    for (const char* name : names) {
        result.append(name);
    }
    return nb::tuple(result);
}

nb::list list_levels() {
    int count = 0;
    const sqrtdk::Level* levels = sqrtdk::levels(&count);
    nb::list result;
    for (int i = 0; i < count; ++i) {
        result.append(nb::make_tuple(levels[i].name, levels[i].runs_here));
    }
    return result;
}

}  // namespace

NB_MODULE(_kernel, module) {
    module.doc() = "The kernel's contract (kernel.h) for sqrtdk.backends and sqrtdk.attention; private.";
#define SQRTDK_ARGUMENT(kind, name) nb::arg(#name).none(),
#define SQRTDK_NAMED                                                                               \
    nb::arg("level"), nb::arg("threads"), nb::arg("team"), nb::arg("dtype"), nb::arg("mask_kind"), \
        SQRTDK_CALL_FIELDS(SQRTDK_ARGUMENT)
    module.def("forward", &forward, SQRTDK_NAMED nb::arg("output"), nb::arg("measures").none(),
               nb::arg("counts").none(), nb::arg("weights") = nb::none(), nb::arg("saved") = nb::none(),
               nb::arg("exact") = nb::none(),
               "One forward pass into output and statistics; False if an array is not aligned to its elements.");
#define SQRTDK_GRAD(name) , nb::arg("grad_" #name).none()
    module.def("backward", &backward, SQRTDK_NAMED nb::arg("saved"), nb::arg("output"), nb::arg("grad_output"),
               nb::arg("grad_query"), nb::arg("grad_key"), nb::arg("grad_value") SQRTDK_ROW_GRADIENTS(SQRTDK_GRAD),
               "One backward pass into the gradients; False if an array is not aligned to its elements.");
#define SQRTDK_TEXT(name) #name,
#define SQRTDK_FIELD_TEXT(kind, name) #name,
    module.attr("CALL_FIELDS") = make_tuple({SQRTDK_CALL_FIELDS(SQRTDK_FIELD_TEXT)});
    module.attr("ROW_GRADIENTS") = make_tuple({SQRTDK_ROW_GRADIENTS(SQRTDK_TEXT)});
    module.attr("ROW_FIELDS") = make_tuple({SQRTDK_ROW_COUNTS(SQRTDK_TEXT) SQRTDK_ROW_MEASURES(SQRTDK_TEXT)});
    module.attr("SUMMARISED") = make_tuple({SQRTDK_SUMMARISED(SQRTDK_TEXT)});
    module.def("summarise", &summarise, nb::arg("threads"), nb::arg("team"), nb::arg("counts"), nb::arg("measures"),
               nb::arg("present").none(), nb::arg("positions").none(), nb::arg("keys"), nb::arg("farthest"),
               nb::arg("next_edge"), nb::arg("edges_below"), nb::arg("count"), nb::arg("moments"), nb::arg("ends"),
               nb::arg("filled"), nb::arg("numbers"), nb::arg("offsets"), nb::arg("share_sum"), nb::arg("sequences"),
               "Moments, histograms and most attended keys of rows, per head.");
    module.def("add_up_lengths", &add_up_lengths, nb::arg("dtype"), nb::arg("queries"), nb::arg("keys"),
               nb::arg("scale"), nb::arg("width"), nb::arg("sums"), "Sums of query lengths and key spread, per head.");
    module.def("levels", &list_levels, "The CPU levels compiled in, best first: (name, runs here).");
    module.def("probe_fma", &sqrtdk::probe_fma, nb::arg("level"), nb::arg("threads"), nb::call_guard<ReleasedGil>(),
               "float32 multiply-adds per second.");
    module.def("probe_read", &sqrtdk::probe_read, nb::arg("level"), nb::arg("threads"), nb::call_guard<ReleasedGil>(),
               "Bytes read per second.");
    module.def("pool_size", &sqrtdk::pool_size, "Worker threads alive now, the caller's left out.");
}
