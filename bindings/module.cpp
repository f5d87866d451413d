// Arrays to structs, the GIL released, errors raised; no maths. Arguments are checked in Python before they come here.
//
// Arrays cross by the buffer protocol for speed alone: 28 ns an array, against 79 ns (151 ns if read-only) for
// nb::ndarray with nanobind 3.1 and NumPy 2.4, that is 0.2 to 0.5 us of a call that takes 4.4. Both take any strides.
// bfloat16, which has no buffer format, comes as a view of uint16.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <optional>

#include "kernel.h"

namespace nb = nanobind;

namespace {

constexpr int max_axes = 64;  // NumPy's limit
constexpr double small_call = 1 << 16;  // multiply-adds; a double, as their number may pass int64

// A borrowed view of an array; None gives one without data. What has no buffer, a torch tensor, comes as a tuple
// (address, bytes per element, shape, strides in elements), which costs half of making it an array first.
class View {
public:
    explicit View(nb::handle array, int flags = PyBUF_STRIDES) {
        buffer_.obj = nullptr;
        if (array.is_none()) {
            return;
        }
        if (PyTuple_CheckExact(array.ptr())) {
            read_tuple(array);
            return;
        }
        if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) != 0) {
            throw nb::python_error();
        }
        data_ = buffer_.buf;
        itemsize_ = buffer_.itemsize;
        axes_ = buffer_.ndim;
        for (int axis = 0; axis < axes_; ++axis) {
            sizes_[axis] = buffer_.shape[axis];
            strides_[axis] = buffer_.strides[axis];
        }
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() {
        if (buffer_.obj) {
            PyBuffer_Release(&buffer_);
        }
    }

    void* data() const { return data_; }

    // Axes count from the end; one that is missing has size 1.
    int64_t size(int from_end) const { return from_end <= axes_ ? sizes_[axes_ - from_end] : 1; }

    // In elements. An axis that is missing or of size 1 is broadcast.
    int64_t stride(int from_end) const { return size(from_end) == 1 ? 0 : strides_[axes_ - from_end] / itemsize_; }

    int axes() const { return axes_; }

    bool is_aligned() const {
        bool aligned = reinterpret_cast<uintptr_t>(data_) % uintptr_t(itemsize_) == 0;
        for (int axis = 0; axis < axes_; ++axis) {
            aligned = aligned && (sizes_[axis] == 1 || strides_[axis] % itemsize_ == 0);
        }
        return aligned;
    }

private:
    void read_tuple(nb::handle tuple) {
        PyObject* const shape = PyTuple_GetItem(tuple.ptr(), 2);
        PyObject* const strides = PyTuple_GetItem(tuple.ptr(), 3);
        if (!shape || !strides || PyTuple_Size(shape) != PyTuple_Size(strides) || PyTuple_Size(shape) > max_axes) {
            throw nb::value_error("a tensor must come as (address, bytes per element, shape, strides)");
        }
        data_ = PyLong_AsVoidPtr(PyTuple_GetItem(tuple.ptr(), 0));
        itemsize_ = PyLong_AsLongLong(PyTuple_GetItem(tuple.ptr(), 1));
        axes_ = int(PyTuple_Size(shape));
        for (int axis = 0; axis < axes_; ++axis) {
            sizes_[axis] = PyLong_AsLongLong(PyTuple_GetItem(shape, axis));
            strides_[axis] = PyLong_AsLongLong(PyTuple_GetItem(strides, axis)) * itemsize_;
        }
        if (PyErr_Occurred()) {
            throw nb::python_error();
        }
    }

    Py_buffer buffer_;
    void* data_ = nullptr;
    int64_t itemsize_ = 1;
    int axes_ = 0;
    int64_t sizes_[max_axes];
    int64_t strides_[max_axes];  // in bytes
};

// Strides of q, k, v, scale and mask along one leading axis, or along several that lie evenly in all five.
struct BatchAxis {
    int64_t size;
    int64_t strides[5];
};

// The leading axes with those of size 1 dropped and neighbours joined where every array allows it; outermost first.
int join_batch_axes(const View* const (&arrays)[5], const int (&inner_axes)[5], int count, BatchAxis* joined) {
    int kept = 0;
    for (int axis = count; axis >= 1; --axis) {
        BatchAxis next = {arrays[0]->size(inner_axes[0] + axis), {}};
        if (next.size == 1) {
            continue;
        }
        bool joins = kept > 0;
        for (int i = 0; i < 5; ++i) {
            next.strides[i] = arrays[i]->stride(inner_axes[i] + axis);
            joins = joins && joined[kept - 1].strides[i] == next.strides[i] * next.size;
        }
        if (joins) {
            next.size *= joined[kept - 1].size;
            --kept;
        }
        joined[kept++] = next;
    }
    return kept;
}

template <typename T>
T* moved(T* pointer, int64_t elements) {
    return pointer ? pointer + elements : pointer;
}

const void* moved_bytes(const void* pointer, int64_t bytes) {
    return pointer ? static_cast<const char*>(pointer) + bytes : pointer;
}

sqrtdk::Statistics statistics_at(double* floats, int64_t* counts, int64_t all_rows, int64_t first_row) {
    if (!floats) {
        return {};
    }
    const auto real = [=](int field) { return floats + field * all_rows + first_row; };
    sqrtdk::Statistics to;
    to.visible_keys = counts + first_row;
    to.max_key = counts + all_rows + first_row;
    to.max_logit = real(0);
    to.logsumexp = real(1);
    to.entropy = real(2);
    to.tail_weight = real(3);
    to.tail_p2 = real(4);
    to.tail_p3 = real(5);
    to.logit_mean = real(6);
    to.logit_variance = real(7);
    to.score_max = real(8);
    to.score_variance = real(9);
    to.sink_weight = real(10);
    return to;
}

// Ctrl-C is looked for twenty times a second: taking the GIL more often would wait for other Python threads each time.
class Interrupts {
public:
    static bool poll(void* context) {
        Interrupts& self = *static_cast<Interrupts*>(context);
        const auto now = std::chrono::steady_clock::now();
        if (now < self.next_) {
            return self.raised_;
        }
        nb::gil_scoped_acquire gil;
        self.raised_ = self.raised_ || PyErr_CheckSignals() != 0;
        self.next_ = std::chrono::steady_clock::now() + interval;
        return self.raised_;
    }

private:
    static constexpr std::chrono::milliseconds interval{50};
    std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + interval;
    bool raised_ = false;
};

int64_t bytes_of(sqrtdk::Dtype dtype) {
    return dtype == sqrtdk::Dtype::float64 ? 8 : dtype == sqrtdk::Dtype::float32 ? 4 : 2;
}

int64_t bytes_of(sqrtdk::MaskKind kind) {
    const bool is_float = kind != sqrtdk::MaskKind::none && kind != sqrtdk::MaskKind::boolean;
    return is_float ? bytes_of(sqrtdk::Dtype(int(kind) - int(sqrtdk::MaskKind::float16))) : 1;
}

void raise_unless_ok(sqrtdk::Status status, const char* level) {
    switch (status) {
        case sqrtdk::Status::ok:
            return;
        case sqrtdk::Status::interrupted:  // PyErr_CheckSignals has set the exception
            throw nb::python_error();
        case sqrtdk::Status::out_of_memory:
            PyErr_NoMemory();
            throw nb::python_error();
        default:
            PyErr_Format(PyExc_RuntimeError, "the kernel has no level '%s' that runs here", level);
            throw nb::python_error();
    }
}

// False if an array is not aligned to its elements: the caller copies it and comes back.
bool forward(const char* level, int threads, int dtype, nb::handle q_array, nb::handle k_array, nb::handle v_array,
             double scale_number, nb::handle scale_array, int mask_kind, nb::handle mask_array, int64_t first,
             int64_t last, double softcap, nb::handle sinks_array, nb::handle output_array, nb::handle floats_array,
             nb::handle counts_array, uintptr_t team) {
    const View q(q_array), k(k_array), v(v_array), scale(scale_array), mask(mask_array), sinks(sinks_array);
    const int writable = PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS;
    const View output(output_array, writable), floats(floats_array, writable), counts(counts_array, writable);
    if (!(q.is_aligned() && k.is_aligned() && v.is_aligned() && scale.is_aligned() && mask.is_aligned())) {
        return false;
    }

    sqrtdk::Forward call;
    call.dtype = sqrtdk::Dtype(dtype);
    const int64_t heads = q.size(3);
    call.groups = k.size(3);
    call.shared = heads / call.groups;
    call.queries = q.size(2);
    call.keys = k.size(2);
    call.d_k = q.size(1);
    call.d_v = v.size(1);
    const int64_t shared = call.shared;
    call.k = {k.data(), 0, k.stride(3), k.stride(2), k.stride(1)};
    call.v = {v.data(), 0, v.stride(3), v.stride(2), v.stride(1)};
    call.q = {q.data(), 0, shared * q.stride(3), q.stride(3), q.stride(2), q.stride(1)};
    call.scale = {&scale_number, 0, 0, 0, 0};
    if (scale.data()) {
        call.scale = {static_cast<const double*>(scale.data()), 0, shared * scale.stride(2), scale.stride(2),
                      scale.stride(1)};
    }
    call.mask = {sqrtdk::MaskKind(mask_kind), mask.data(),    0,
                 shared * mask.stride(3),     mask.stride(3), mask.stride(2), mask.stride(1)};
    call.first = first;
    call.last = last;
    call.softcap = softcap;
    call.sinks = static_cast<const double*>(sinks.data());
    call.threads = threads;
    call.team = reinterpret_cast<sqrtdk::Team>(team);
    Interrupts interrupts;
    call.interrupted = &Interrupts::poll;
    call.context = &interrupts;

    BatchAxis axes[max_axes];
    const View* const arrays[5] = {&q, &k, &v, &scale, &mask};
    const int inner_axes[5] = {3, 3, 3, 2, 3};
    const int leading = q.axes() > 3 ? q.axes() - 3 : 0;
    int outer = join_batch_axes(arrays, inner_axes, leading, axes);
    // The innermost joined axis goes through the kernel in one call; what lies unevenly outside of it is a loop here.
    const BatchAxis inner = outer ? axes[--outer] : BatchAxis{1, {}};
    call.batch = inner.size;
    call.q.n = inner.strides[0];
    call.k.n = inner.strides[1];
    call.v.n = inner.strides[2];
    call.scale.n = inner.strides[3];
    call.mask.n = inner.strides[4];
    int64_t rounds = 1;
    for (int axis = 0; axis < outer; ++axis) {
        rounds *= axes[axis].size;
    }
    const int64_t rows = call.batch * heads * call.queries;
    const int64_t item = bytes_of(call.dtype);

    sqrtdk::Status status = sqrtdk::Status::ok;
    {
        // A call of a few microseconds is over before another thread could have used the GIL.
        std::optional<nb::gil_scoped_release> released;
        if (double(rounds * rows) * double(call.keys) * double(call.d_k + call.d_v) > small_call) {
            released.emplace();
        }
        for (int64_t round = 0; round < rounds && status == sqrtdk::Status::ok; ++round) {
            int64_t at[5] = {};
            int64_t left = round;
            for (int axis = outer - 1; axis >= 0; --axis) {
                for (int i = 0; i < 5; ++i) {
                    at[i] += left % axes[axis].size * axes[axis].strides[i];
                }
                left /= axes[axis].size;
            }
            sqrtdk::Forward part = call;
            part.q.data = moved_bytes(call.q.data, at[0] * item);
            part.k.data = moved_bytes(call.k.data, at[1] * item);
            part.v.data = moved_bytes(call.v.data, at[2] * item);
            part.scale.data = moved(call.scale.data, at[3]);
            part.mask.data = moved_bytes(call.mask.data, at[4] * bytes_of(call.mask.kind));
            part.output = static_cast<char*>(output.data()) + round * rows * call.d_v * item;
            part.statistics = statistics_at(static_cast<double*>(floats.data()), static_cast<int64_t*>(counts.data()),
                                            rounds * rows, round * rows);
            status = sqrtdk::forward(part, level);
            if (status == sqrtdk::Status::ok && rounds > 1 && Interrupts::poll(&interrupts)) {
                status = sqrtdk::Status::interrupted;
            }
        }
    }
    raise_unless_ok(status, level);
    return true;
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
    module.def("forward", &forward, nb::arg("level"), nb::arg("threads"), nb::arg("dtype"), nb::arg("q"), nb::arg("k"),
               nb::arg("v"), nb::arg("scale_number"), nb::arg("scale").none(), nb::arg("mask_kind"),
               nb::arg("mask").none(), nb::arg("first"), nb::arg("last"), nb::arg("softcap"), nb::arg("sinks").none(),
               nb::arg("output"), nb::arg("floats").none(), nb::arg("counts").none(), nb::arg("team") = 0,
               "One forward pass into output and statistics; False if an array is not aligned to its elements.");
    module.def("levels", &list_levels, "The CPU levels compiled in, best first: (name, runs here).");
    module.def("best_level", [] { return sqrtdk::best_level(); }, "The best level that runs here.");
    module.def("probe_fma", &sqrtdk::probe_fma, nb::arg("level"), nb::arg("threads"),
               nb::call_guard<nb::gil_scoped_release>(), "float32 multiply-adds per second.");
    module.def("probe_read", &sqrtdk::probe_read, nb::arg("level"), nb::arg("threads"),
               nb::call_guard<nb::gil_scoped_release>(), "Bytes read per second.");
    module.def("pool_size", &sqrtdk::pool_size, "Worker threads alive now, the caller's left out.");
}
