// moe-pager-tests SUITE: runs the suite's tests; exit code 1 if a check failed or the suite is empty.

#include "check.h"

#include <cstring>

int main(int argc, char ** argv) {
    int n_run = 0;
    for (const auto & test : check::tests()) {
        if (argc < 2 || std::strcmp(argv[1], test.suite) == 0) {
            const int before = check::failures();
            test.body();
            ++n_run;
            std::printf("%s %s.%s\n", check::failures() == before ? "ok  " : "FAIL", test.suite, test.name);
        }
    }
    return n_run > 0 && check::failures() == 0 ? 0 : 1;
}
