// A device that is none: memory that only queued work may touch, and streams that do nothing before somebody waits for them.
//
// Real devices run ahead of whoever queues; this one lags behind as far as it may. So whatever relies on a copy or a kernel having run without
// waiting for it finds what was there before: an event that is not waited for shows, every time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_PEER_ACCESS = 217, INVALID_HANDLE = 400,
              NOT_FOUND = 500;
constexpr int CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905;

struct Event;

// Work that was noted down instead of done: the nodes of a graph.
struct Capture {
    std::vector<std::function<void()>> nodes;
    bool spoilt = false;
};

struct Stream {
    std::shared_ptr<Capture> capture;
    std::deque<std::function<void()>> queue;
    uint64_t queued = 0, done = 0;
};

// Where a stream was when the event was last recorded.
struct Event {
    Stream* stream = nullptr;
    uint64_t at = 0;
    bool blocking = false;
};

// The file behind an allocation of this process.
struct Backing {
    int file;
    uint64_t serial;
};

// Another process's memory, open here.
struct Opened {
    int pid;
    uint64_t serial;
    size_t times;
};

struct Counts {
    size_t allocations = 0, device_bytes = 0, pinned = 0, streams = 0, events = 0, modules = 0, contexts = 0, blas = 0;
    size_t launches = 0, products = 0, copies = 0, dropped_waits = 0, syncs = 0, dropped_syncs = 0;
    size_t opens = 0, exports = 0;
};

// Everything below is reached with `lock` held.
struct Device {
    std::recursive_mutex lock;
    std::map<uintptr_t, size_t> memory;  // by first byte; what was opened too
    std::map<uintptr_t, Backing> files;
    std::map<uintptr_t, Opened> opened;
    uint64_t serial = 0;
    std::map<uintptr_t, size_t> pinned;
    Counts counts;
    int running = 0;
    // See fake_freeze.
    std::string frozen_kernel;
    int frozen_argument = 0;

    // Whether all of these bytes are one allocation's.
    bool owns(uintptr_t address, size_t len) const;
    // Memory that can be mapped elsewhere; null if there is none.
    void* take(size_t len);
    void give_back(uintptr_t base, size_t len);
    void run(Stream& stream, uint64_t until);
    // Or notes it down, while the stream captures.
    void enqueue(Stream& stream, std::function<void()> work);
    // What a capture does not bear: an error.
    int spoil(Stream& stream);
};

Device& device();
// Whether a context is current on this thread.
bool has_context();
size_t& captures_of_this_thread();

}  // namespace fake

// For the library of products: queues work that may touch device memory, once or, in a graph, many times; `release` comes after the last. 0, or an error of the
// driver's.
extern "C" int fake_enqueue(void* stream, void (*work)(void*), void* argument, void (*release)(void*));
extern "C" int fake_owns(uint64_t address, size_t len);
extern "C" void fake_count(int products, int handles);
