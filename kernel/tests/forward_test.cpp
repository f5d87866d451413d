// Statuses of forward() for calls that are stopped or cannot be computed. forward_fuzz.cpp tests the numbers.
#include "random_call.h"

using namespace sqrtdk;

namespace {

int failures = 0;

void expect(bool holds, const char* level, const char* what) {
    if (holds) return;
    std::printf("%s: %s\n", level, what);
    ++failures;
}

void check_level(const char* level) {
    Random random(20260);
    for (int i = 0; i < 20; ++i) {
        Case test(random);
        Results results(test.call, true);
        test.call.threads = 2;
        test.call.interrupted = [](void*) { return true; };
        const Status status = forward(test.call, level);  // a call that ends before it is asked is complete
        expect(status == Status::interrupted || status == Status::ok, level,
               "an interrupted call ends as something else");
    }
    Case test(random);
    Results results(test.call, true);
    Forward call = test.call;
    call.dtype = Dtype(4);
    expect(forward(call, level) == Status::unknown_dtype, level, "an unknown dtype is not refused");
    call.dtype = Dtype(-1);
    expect(forward(call, level) == Status::unknown_dtype, level, "a negative dtype is not refused");
    call = test.call;
    call.mask.kind = MaskKind(6);
    expect(forward(call, level) == Status::unknown_mask, level, "an unknown kind of mask is not refused");
}

}  // namespace

int main() {
    int count = 0;
    const Level* all = levels(&count);
    for (int i = 0; i < count; ++i) {
        if (all[i].runs_here) check_level(all[i].name);
        std::printf("%s: %s\n", all[i].name, all[i].runs_here ? "checked" : "does not run here");
    }
    Forward nothing = {};
    expect(forward(nothing, "no such level") == Status::unknown_level, "no such level", "is not refused");
    return failures != 0;
}
