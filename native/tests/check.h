#pragma once

// The smallest test frame that does: TEST(suite, name) { CHECK(...); }. A test program runs all tests of one suite.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace check {

struct test {
    const char *          suite;
    const char *          name;
    std::function<void()> body;
};

inline std::vector<test> & tests() {
    static std::vector<test> all;
    return all;
}

inline std::atomic<int> & failures() {
    static std::atomic<int> n{ 0 };
    return n;
}

struct registration {
    registration(const char * suite, const char * name, std::function<void()> body) {
        tests().push_back({ suite, name, std::move(body) });
    }
};

inline void report(bool ok, const char * what, const char * file, int line) {
    if (!ok) {
        std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
        ++failures();
    }
}

// waits for what another thread will do; the limit only ends a test that would hang
inline bool eventually(const std::function<bool()> & condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > limit) {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
}

} // namespace check

#define TEST(suite, name)                                                                                              \
    static void                      test_##suite##_##name();                                                          \
    static const check::registration registration_##suite##_##name(#suite, #name, test_##suite##_##name);              \
    static void                      test_##suite##_##name()

#define CHECK(condition) check::report((condition), #condition, __FILE__, __LINE__)
