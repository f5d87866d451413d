// Every operation of one level's header in simd/ against scalar code, on random and special numbers. Compiled once per
// level with the level's own flags and -ffp-contract=off.
// Exits with 0 if everything holds, or if this machine cannot run the level (and says so).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "rows/arena.h"
#include "simd/level.h"

namespace {

using sqrtdk::SQRTDK_LEVEL::Simd;

int failures = 0;

template <class T>
auto bits_of(T x) {
    std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t> bits;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}

template <class T>
T with_payload(unsigned payload) {  // a quiet NaN that can be told from others
    T x = std::numeric_limits<T>::quiet_NaN();
    auto bits = bits_of(x);
    bits |= payload;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <class T>
bool same_number(T a, T b) {  // any NaN for any NaN: arithmetic need not keep the payload
    return bits_of(a) == bits_of(b) || (a != a && b != b);
}

void expect(bool holds, const char* type, const char* what, double a, double b, double c, double got) {
    if (holds) return;
    if (++failures <= 20) std::fprintf(stderr, "%s %s(%a, %a, %a) gave %a\n", type, what, a, b, c, got);
}

template <class T>
std::vector<T> special_numbers() {
    using L = std::numeric_limits<T>;
    const T whole = 1 / L::epsilon();  // from here on every number is an integer
    std::vector<T> numbers = {
        T(0),         T(1),     T(0.5),        T(1.5),         T(2.5),          T(0.49999997),     T(3),
        T(1e10),      T(1) / 3, L::infinity(), L::min(),       L::denorm_min(), L::min() / 2,      L::max(),
        L::epsilon(), whole,    whole - 1,     whole - T(0.5), 2 * whole + 2,   with_payload<T>(1)};
    const size_t count = numbers.size();
    for (size_t i = 0; i < count; ++i) numbers.push_back(-numbers[i]);
    return numbers;
}

template <class T>
struct Checks {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    static constexpr int lanes = S::lanes;
    static constexpr uint64_t all_lanes = (uint64_t{1} << lanes) - 1;
    const char* const type = sizeof(T) == 4 ? "float" : "double";
    T a[lanes], b[lanes], c[lanes], got[lanes];

    // Lanes hold different operands, so that a lane mix-up shows.
    template <class Operation, class Scalar>
    void each(const char* what, Operation operation, Scalar scalar) {
        S::store(got, operation(S::load(a), S::load(b), S::load(c)));
        for (int i = 0; i < lanes; ++i) expect(scalar(a[i], b[i], c[i], got[i]), type, what, a[i], b[i], c[i], got[i]);
    }
    template <class Operation, class Scalar>
    void each_mask(const char* what, Operation operation, Scalar scalar) {
        const uint64_t mask = S::bits(operation(S::load(a), S::load(b)));
        for (int i = 0; i < lanes; ++i) {
            const bool bit = mask >> i & 1;
            expect(bit == scalar(a[i], b[i]), type, what, a[i], b[i], 0, bit);
        }
        expect((mask & ~all_lanes) == 0, type, "bits past the lanes", 0, 0, 0, double(mask));
    }

    void arithmetic() {
        each(
            "add", [](Vec x, Vec y, Vec) { return S::add(x, y); },
            [](T x, T y, T, T r) { return same_number<T>(r, x + y); });
        each(
            "sub", [](Vec x, Vec y, Vec) { return S::sub(x, y); },
            [](T x, T y, T, T r) { return same_number<T>(r, x - y); });
        each(
            "mul", [](Vec x, Vec y, Vec) { return S::mul(x, y); },
            [](T x, T y, T, T r) { return same_number<T>(r, x * y); });
        each(
            "div", [](Vec x, Vec y, Vec) { return S::div(x, y); },
            [](T x, T y, T, T r) { return same_number<T>(r, x / y); });
        // To the bit, payload included: which operand comes through a NaN is part of the contract.
        each(
            "max", [](Vec x, Vec y, Vec) { return S::max(x, y); },
            [](T x, T y, T, T r) { return bits_of(r) == bits_of(x > y ? x : y); });
        each(
            "min", [](Vec x, Vec y, Vec) { return S::min(x, y); },
            [](T x, T y, T, T r) { return bits_of(r) == bits_of(x < y ? x : y); });
        each(
            "fma", [](Vec x, Vec y, Vec z) { return S::fma(x, y, z); },
            [](T x, T y, T z, T r) { return same_number(r, fused ? std::fma(x, y, z) : x * y + z); });
        each(
            "fnma", [](Vec x, Vec y, Vec z) { return S::fnma(x, y, z); },
            [](T x, T y, T z, T r) { return same_number(r, fused ? std::fma(-x, y, z) : z - x * y); });
        each(
            "round", [](Vec x, Vec, Vec) { return S::round(x); },
            [](T x, T, T, T r) { return same_number(r, std::nearbyint(x)); });
        each(
            "abs", [](Vec x, Vec, Vec) { return S::abs(x); },
            [](T x, T, T, T r) { return bits_of(r) == bits_of(std::fabs(x)); });
        each(
            "with_sign", [](Vec x, Vec y, Vec) { return S::with_sign(S::abs(x), y); },
            [](T x, T y, T, T r) { return bits_of(r) == bits_of(std::copysign(x, y)); });
        each("all", [](Vec, Vec, Vec) { return S::all(T(-3.25)); }, [](T, T, T, T r) { return r == T(-3.25); });
        each("zero", [](Vec, Vec, Vec) { return S::zero(); }, [](T, T, T, T r) { return bits_of(r) == 0; });
    }

    void comparisons() {
        each_mask("equal", [](Vec x, Vec y) { return S::equal(x, y); }, [](T x, T y) { return x == y; });
        each_mask("less", [](Vec x, Vec y) { return S::less(x, y); }, [](T x, T y) { return x < y; });
        each_mask("not_less", [](Vec x, Vec y) { return S::not_less(x, y); }, [](T x, T y) { return !(x < y); });
    }

    void masks(uint64_t word) {
        const auto mask = S::from_bits(word);
        expect(S::bits(mask) == (word & all_lanes), type, "from_bits", double(word), 0, 0, double(S::bits(mask)));
        T kept[lanes], chosen[lanes];
        S::store(kept, S::keep(mask, S::load(a)));
        S::store(chosen, S::choose(mask, S::load(a), S::load(b)));
        for (int i = 0; i < lanes; ++i) {
            const bool bit = word >> i & 1;
            expect(bits_of(kept[i]) == (bit ? bits_of(a[i]) : 0), type, "keep", a[i], bit, 0, kept[i]);
            expect(bits_of(chosen[i]) == bits_of(bit ? a[i] : b[i]), type, "choose", a[i], b[i], bit, chosen[i]);
        }
    }

    // What exp needs: numbers around 1 times 2^n with a normal result, NaN kept.
    void powers(std::mt19937_64& random) {
        const int least = std::numeric_limits<T>::min_exponent - 1;
        for (int n = least; n <= 1; ++n) {
            for (int i = 0; i < lanes; ++i) {
                a[i] = T(n == least ? 1 : 0.7) + T(random() % 1000) / 1500;
                b[i] = T(n);
            }
            each(
                "scale2", [](Vec x, Vec y, Vec) { return S::scale2(x, y); },
                [](T x, T y, T, T r) { return bits_of(r) == bits_of(std::ldexp(x, int(y))); });
        }
        // exp(NaN) brings NaN for both; any payload, since it is the user's.
        for (T n : {with_payload<T>(0), with_payload<T>(0x7ff), -with_payload<T>(0x2a5)}) {
            for (int i = 0; i < lanes; ++i) {
                a[i] = with_payload<T>(unsigned(i));
                b[i] = n;
            }
            each("scale2", [](Vec x, Vec y, Vec) { return S::scale2(x, y); }, [](T, T, T, T r) { return r != r; });
        }
    }

    void transposition() {
        Vec rows[lanes];
        for (int i = 0; i < lanes; ++i) {
            for (int j = 0; j < lanes; ++j) a[j] = T(100 * i + j);
            rows[i] = S::load(a);
        }
        S::transpose(rows);
        for (int i = 0; i < lanes; ++i) {
            S::store(got, rows[i]);
            for (int j = 0; j < lanes; ++j) expect(got[j] == T(100 * j + i), type, "transpose", i, j, 0, got[j]);
        }
    }

    void unaligned() {
        T memory[3 * lanes + 1];
        for (int i = 0; i < 3 * lanes + 1; ++i) memory[i] = T(i);
        for (int at = 0; at <= lanes; ++at) {
            T copy[3 * lanes];
            for (T& x : copy) x = T(-1);
            S::store(copy + at, S::load(memory + at));
            for (int i = 0; i < 3 * lanes; ++i)
                expect(copy[i] == (i >= at && i < at + lanes ? T(i) : T(-1)), type, "load, store", at, i, 0, copy[i]);
        }
    }

    void run() {
        std::mt19937_64 random(1);
        const std::vector<T> special = special_numbers<T>();
        const auto any_special = [&] { return special[random() % special.size()]; };
        for (T x : special)
            for (T y : special) {
                for (int i = 0; i < lanes; ++i) {
                    a[i] = i % 2 == 0 ? x : any_special();
                    b[i] = i % 2 == 0 ? y : any_special();
                    c[i] = any_special();
                }
                arithmetic();
                comparisons();
                masks(random());
            }
        const auto any_bits = [&] {
            const uint64_t bits = random();
            T x;
            std::memcpy(&x, &bits, sizeof x);
            return x != x ? with_payload<T>(unsigned(bits & 0xff)) : x;  // signalling NaNs are turned quiet
        };
        std::normal_distribution<double> normal;
        for (int repeat = 0; repeat < 20000; ++repeat) {
            for (int i = 0; i < lanes; ++i) {
                const bool raw = repeat % 2 == 0;
                a[i] = raw ? any_bits() : T(normal(random));
                b[i] = raw ? any_bits() : T(normal(random));
                c[i] = raw ? any_bits() : -a[i] * b[i];  // where a fused sum keeps what a product rounds away
            }
            arithmetic();
            comparisons();
            masks(random());
        }
        for (uint64_t word = 0; word <= all_lanes && word < 70000; ++word) masks(word | random() << lanes);
        powers(random);
        transposition();
        unaligned();
    }

    static const bool fused;
};

// Known from the level, not from its answers: otherwise a lost fusion would go unnoticed.
#define IS_PORTABLE_portable 1
#define IS_PORTABLE_(level) IS_PORTABLE_##level
#define IS_PORTABLE(level) IS_PORTABLE_(level)
#if IS_PORTABLE(SQRTDK_LEVEL) + 0 && !defined(__aarch64__)
template <class T>
const bool Checks<T>::fused = false;
#else
template <class T>
const bool Checks<T>::fused = true;
#endif

void check_bytes() {
    std::mt19937_64 random(3);
    for (int repeat = 0; repeat < 5000; ++repeat) {
        uint8_t bytes[65];
        uint64_t expected = 0;
        for (int i = 0; i < 65; ++i)
            bytes[i] = random() % 2 == 0 ? 0 : uint8_t(repeat < 64 ? 1 << (repeat % 8) : random());
        for (int i = 0; i < 64; ++i) expected |= uint64_t(bytes[i + 1] != 0) << i;  // not aligned
        if (sqrtdk::SQRTDK_LEVEL::find_nonzero(bytes + 1) == expected) continue;
        ++failures;
        std::fprintf(stderr, "find_nonzero: wrong bits\n");
    }
}

// Arrays lie where they were counted. A layout that asks for more when they are handed out, or for more than a size can
// be, is refused.
void check_arena() {
    using sqrtdk::SQRTDK_LEVEL::Arena;
    float* first;
    double* second;
    char* last;
    const Arena whole([&](Arena& arena) {
        arena.take(first, 17);  // two lines of 64 bytes
        arena.take(second, 2, 4);
        arena.take(last, 0);
    });
    const bool fits = whole.ok() && reinterpret_cast<char*>(second) == reinterpret_cast<char*>(first) + 128 &&
                      last == reinterpret_cast<char*>(second) + 64;
    int64_t rounds = 0;
    const Arena growing([&](Arena& arena) { arena.take(first, ++rounds, 17); });
    const bool grows = growing.ok() || first != nullptr;
    const Arena product([&](Arena& arena) { arena.take(second, int64_t(1) << 32, int64_t(1) << 32); });
    const Arena bytes([&](Arena& arena) { arena.take(second, int64_t(1) << 61); });
    const Arena sum([&](Arena& arena) {
        for (int i = 0; i < 3; ++i) arena.take(last, INT64_MAX - 200);
    });
    if (fits && !grows && !product.ok() && !bytes.ok() && !sum.ok()) return;
    ++failures;
    std::fprintf(stderr, "an arena does not know its end\n");
}

#ifdef SQRTDK_HAS_PAIRS
using Pairs = sqrtdk::SQRTDK_LEVEL::PairSimd<float>;

float widened(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// Rounded to nearest even, as the hardware's conversion and the kernel's results are.
uint16_t narrowed(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void expect(bool holds, const char* what) {
    if (holds) return;
    ++failures;
    std::fprintf(stderr, "pairs: %s\n", what);
}

void check_pairs() {
    std::mt19937_64 random(4);
    std::normal_distribution<float> normal;
    for (int repeat = 0; repeat < 20000; ++repeat) {
        float x[17], y[17], c[16], stored[32];
        uint16_t first[33], second[33], row[32];
        const float size = std::ldexp(1.0f, int(random() % 60) - 30);
        for (int i = 0; i < 16; ++i) {
            x[i + 1] = size * normal(random);
            y[i + 1] = normal(random);
            c[i] = normal(random);
        }
        for (int i = 0; i < 33; ++i) {
            first[i] = narrowed(normal(random));
            second[i] = narrowed(normal(random));
        }
        // Rows and pairs, from and to memory that is not aligned.
        Pairs::interleave(first + 1, second + 1, stored);
        for (int i = 0; i < 32; ++i)
            expect(bits_of(stored[i]) == (first[i + 1] | uint32_t(second[i + 1]) << 16), "interleave");
        Simd<float>::store(c, Pairs::widen(first + 1));
        for (int i = 0; i < 16; ++i) expect(bits_of(c[i]) == bits_of(widened(first[i + 1])), "widen");
        const auto u = Simd<float>::load(x + 1), v = Simd<float>::load(y + 1);
        Pairs::store_row(row, u, v);
        for (int i = 0; i < 16; ++i)
            expect(row[i] == narrowed(x[i + 1]) && row[16 + i] == narrowed(y[i + 1]), "store_row");
        Pairs::store_pairs(stored, u, v);
        for (int i = 0; i < 16; ++i) {
            const float low = widened(uint16_t(bits_of(stored[i]))), high = widened(uint16_t(bits_of(stored[i]) >> 16));
            expect(std::fabs(low - x[i + 1]) <= 0x1p-8f * std::fabs(x[i + 1]), "store_pairs, first");
            expect(std::fabs(high - y[i + 1]) <= 0x1p-8f * std::fabs(y[i + 1]), "store_pairs, second");
        }
        float sums[16];
        Simd<float>::store(sums, Pairs::dot(Pairs::all(first + 1), Pairs::load(stored), v));
        for (int i = 0; i < 16; ++i) {
            const double one = double(widened(first[1])) * widened(uint16_t(bits_of(stored[i])));
            const double two = double(widened(first[2])) * widened(uint16_t(bits_of(stored[i]) >> 16));
            const double reach = std::fabs(one) + std::fabs(two) + std::fabs(y[i + 1]);
            expect(std::fabs(sums[i] - (y[i + 1] + one + two)) <= 0x1p-22 * reach, "dot");
        }
        // Any bits, so that numbers below the smallest normal one, infinities and NaN are among them.
        for (int i = 0; i < 16; ++i) {
            const uint32_t bits = repeat % 2 == 0 ? uint32_t(random()) : uint32_t(random()) & 0x807fffffu;
            std::memcpy(x + 1 + i, &bits, 4);
        }
        Pairs::store_exactly(row, Simd<float>::load(x + 1));
        for (int i = 0; i < 16; ++i) expect(row[i] == narrowed(x[i + 1]), "store_exactly");
    }
}
#endif

bool runs_here() {
#if defined(__AVX512BF16__)
    return __builtin_cpu_supports("avx512bf16");
#elif defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

}  // namespace

int main() {
    const char* level = SQRTDK_QUOTE(SQRTDK_LEVEL);
    if (!runs_here()) {
        std::printf("simd %s: compiled, this machine cannot run it\n", level);
        return 0;
    }
    Checks<float>().run();
    Checks<double>().run();
    check_bytes();
    check_arena();
#ifdef SQRTDK_HAS_PAIRS
    check_pairs();
#endif
    if (failures == 0)
        std::printf("simd %s: everything holds\n", level);
    else
        std::fprintf(stderr, "simd %s: %d failures\n", level, failures);
    return failures == 0 ? 0 : 1;
}
