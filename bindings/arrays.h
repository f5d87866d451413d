// Arrays as the binding reads them: strides, leading axes, and the part of a call that both passes share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "kernel.h"

namespace nb = nanobind;

namespace {

constexpr int max_axes = 64;  // NumPy's limit

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
        bool some = true;
        for (int axis = 0; axis < axes_; ++axis) {
            some = some && sizes_[axis] != 0;
        }
        if (some && !data_) {
            throw nb::value_error("a tensor must have an address");
        }
    }

    Py_buffer buffer_;
    void* data_ = nullptr;
    int64_t itemsize_ = 1;
    int axes_ = 0;
    int64_t sizes_[max_axes];
    int64_t strides_[max_axes];  // in bytes
};

// Strides of the strided arrays along one leading axis, or along several that lie evenly in all of them.
#define SQRTDK_AT(name) at_##name,
enum Strided : int { at_q, at_k, at_v, at_mask, at_grad_output, SQRTDK_ROW_NUMBERS(SQRTDK_AT) strided_arrays };
#undef SQRTDK_AT
struct BatchAxis {
    int64_t size;
    int64_t strides[strided_arrays];
};

// The leading axes with those of size 1 dropped and neighbours joined where every array allows it; outermost first.
inline int join_batch_axes(const View* const (&arrays)[strided_arrays], int count, BatchAxis* joined) {
    const auto inner_axes = [](int i) { return i <= at_grad_output ? 3 : 2; };
    int kept = 0;
    for (int axis = count; axis >= 1; --axis) {
        BatchAxis next = {arrays[at_q]->size(inner_axes(at_q) + axis), {}};
        if (next.size == 1) {
            continue;
        }
        bool joins = kept > 0;
        for (int i = 0; i < strided_arrays; ++i) {
            next.strides[i] = arrays[i] ? arrays[i]->stride(inner_axes(i) + axis) : 0;
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

inline const void* moved_bytes(const void* pointer, int64_t bytes) {
    return pointer ? static_cast<const char*>(pointer) + bytes : pointer;
}

inline int64_t bytes_of(sqrtdk::Dtype dtype) {
    return dtype == sqrtdk::Dtype::float64 ? 8 : dtype == sqrtdk::Dtype::float32 ? 4 : 2;
}

inline int64_t bytes_of(sqrtdk::MaskKind kind) {
    const bool is_float = kind != sqrtdk::MaskKind::none && kind != sqrtdk::MaskKind::boolean;
    return is_float ? bytes_of(sqrtdk::Dtype(int(kind) - int(sqrtdk::MaskKind::float16))) : 1;
}

// The kinds of SQRTDK_CALL_FIELDS.
using array = nb::handle;
using number = double;
using integer = int64_t;

// The arguments of both passes, in the order in which they cross.
struct Arguments {
    const char* level;
    int threads;
    uintptr_t team;
    int dtype, mask_kind;
#define SQRTDK_FIELD(kind, name) kind name;
    SQRTDK_CALL_FIELDS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
};

// A call's strided arrays, held while it runs; cut into rounds where the leading axes lie unevenly.
class Inputs {
  public:
    explicit Inputs(const Arguments& given, const View* grad_output = nullptr)
        : q_(given.query),
          k_(given.key),
          v_(given.value),
          mask_(given.mask),
          sinks_(given.sinks),
#define SQRTDK_FIELD(name) name##_(given.name),
          SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
              factor_(given.factor) {
        problem.dtype = sqrtdk::Dtype(given.dtype);
        heads_ = q_.size(3);
        problem.groups = k_.size(3);
        problem.shared = problem.groups == 0 ? 0 : heads_ / problem.groups;
        problem.queries = q_.size(2);
        problem.keys = k_.size(2);
        problem.d_k = q_.size(1);
        problem.d_v = v_.size(1);
        const int64_t shared = problem.shared;
        problem.k = {k_.data(), 0, k_.stride(3), k_.stride(2), k_.stride(1)};
        // Values without features may have no address. None of their numbers is read, wherever they lie.
        problem.v = {v_.data() ? v_.data() : k_.data(), 0, v_.stride(3), v_.stride(2), v_.stride(1)};
        problem.q = query(q_);
#define SQRTDK_FIELD(name) problem.name = per_row(name##_);
        SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
        if (!scale_.data()) {
            problem.scale.data = &factor_;
        }
        problem.mask = {sqrtdk::MaskKind(given.mask_kind),
                        mask_.data(),
                        0,
                        shared * mask_.stride(3),
                        mask_.stride(3),
                        mask_.stride(2),
                        mask_.stride(1)};
        problem.first = given.first;
        problem.last = given.last;
        problem.offset = given.offset;
        problem.softcap = given.softcap;
        problem.sinks = static_cast<const double*>(sinks_.data());
        problem.dropout.probability = given.dropout;
        problem.dropout.seed = given.seed;
        problem.threads = given.threads;
        problem.team = reinterpret_cast<sqrtdk::Team>(given.team);

#define SQRTDK_FIELD(name) &name##_,
        const View* const arrays[strided_arrays] = {&q_,    &k_,         &v_,
                                                    &mask_, grad_output, SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)};
#undef SQRTDK_FIELD
        const int leading = q_.axes() > 3 ? q_.axes() - 3 : 0;
        outer_ = join_batch_axes(arrays, leading, axes_);
        // The innermost joined axis goes through the kernel in one call; what lies unevenly outside of it is a loop.
        const BatchAxis inner = outer_ ? axes_[--outer_] : BatchAxis{1, {}};
        problem.batch = inner.size;
        problem.q.n = inner.strides[at_q];
        problem.k.n = inner.strides[at_k];
        problem.v.n = inner.strides[at_v];
        problem.mask.n = inner.strides[at_mask];
        grad_output_n = inner.strides[at_grad_output];
#define SQRTDK_FIELD(name) problem.name.n = inner.strides[at_##name];
        SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
        for (int axis = 0; axis < outer_; ++axis) {
            rounds *= axes_[axis].size;
        }
        rows = problem.batch * heads_ * problem.queries;
        item = bytes_of(problem.dtype);
    }

    bool are_aligned() const {
        bool aligned = q_.is_aligned() && k_.is_aligned() && v_.is_aligned() && mask_.is_aligned();
#define SQRTDK_FIELD(name) aligned = aligned && name##_.is_aligned();
        SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
        return aligned;
    }

    sqrtdk::Query query(const View& array) const {
        return {array.data(), 0, problem.shared * array.stride(3), array.stride(3), array.stride(2), array.stride(1)};
    }

    // float64 that broadcasts to [..., H, L].
    sqrtdk::Scale per_row(const View& array) const {
        const int64_t head = array.stride(2);
        return {static_cast<const double*>(array.data()), 0, problem.shared * head, head, array.stride(1)};
    }

    // Multiply-adds of the two products of a forward pass.
    double size() const { return double(rounds * rows) * double(problem.keys) * double(problem.d_k + problem.d_v); }

    // Moves the arrays of a call to those of a round; returns how far grad_output moves, in elements.
    int64_t enter(int64_t round, sqrtdk::Problem& part) const {
        int64_t at[strided_arrays] = {};
        part.dropout.first_row = round * rows;
        for (int axis = outer_ - 1; axis >= 0; --axis) {
            for (int i = 0; i < strided_arrays; ++i) {
                at[i] += round % axes_[axis].size * axes_[axis].strides[i];
            }
            round /= axes_[axis].size;
        }
        part.q.data = moved_bytes(problem.q.data, at[at_q] * item);
        part.k.data = moved_bytes(problem.k.data, at[at_k] * item);
        part.v.data = moved_bytes(problem.v.data, at[at_v] * item);
        part.mask.data = moved_bytes(problem.mask.data, at[at_mask] * bytes_of(problem.mask.kind));
#define SQRTDK_FIELD(name) part.name.data = moved(problem.name.data, at[at_##name]);
        SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
        return at[at_grad_output];
    }

    sqrtdk::Problem problem;
    int64_t rounds = 1;
    int64_t rows;  // of one round: batch entries x heads x queries
    int64_t item;  // bytes of an element
    int64_t grad_output_n;

  private:
    const View q_, k_, v_, mask_, sinks_;
#define SQRTDK_FIELD(name) const View name##_;
    SQRTDK_ROW_NUMBERS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
    double factor_;
    int64_t heads_;
    BatchAxis axes_[max_axes];
    int outer_;
};

}  // namespace
