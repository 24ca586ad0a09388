// CUDA graphs of the driver for tests: capture of one stream, and launches that run what was captured when somebody waits for the stream they are in.
//
// A node keeps the arguments that it was captured with, as a device's graph does; memory that they name is looked at when the node runs. What a real driver refuses
// while a thread captures, and what Baton does not capture, is refused, and spoils the capture.

#include "device.h"

#include <cstdio>
#include <cstdlib>

using namespace fake;
using Guard = std::lock_guard<std::recursive_mutex>;

namespace {

// From a template, or ready to be launched: both hold the nodes.
struct Graph {
    std::shared_ptr<Capture> nodes;
};

struct GraphCounts {
    size_t held = 0, captured = 0, launched = 0;
};

GraphCounts counts;

// Templates and graphs share one count of what was not given back.
Graph* make(std::shared_ptr<Capture> nodes) {
    counts.held++;
    return new Graph{std::move(nodes)};
}

int give_back(void* graph) {
    Guard guard(device().lock);
    if (!has_context()) return INVALID_CONTEXT;
    delete static_cast<Graph*>(graph);
    counts.held--;
    return SUCCESS;
}

}  // namespace

#define ENTER()                 \
    Guard guard(device().lock); \
    if (!has_context()) return INVALID_CONTEXT

extern "C" {

// Graphs and templates not given back; graphs made; launches of them.
void fake_graph_counts(size_t out[3]) {
    Guard guard(device().lock);
    out[0] = counts.held;
    out[1] = counts.captured;
    out[2] = counts.launched;
}

// The fault that a test plants: of the kernels whose names begin so, captured from now on, this argument's memory stays what it is when a graph runs
// for the first time. Null for none.
void fake_freeze(const char* kernel, int argument) {
    Guard guard(device().lock);
    device().frozen_kernel = kernel ? kernel : "";
    device().frozen_argument = argument;
}

int cuStreamBeginCapture_v2(void* stream, int mode) {
    ENTER();
    constexpr int THREAD_LOCAL = 1;
    auto& s = *static_cast<Stream*>(stream);
    if (s.capture || mode != THREAD_LOCAL) return CAPTURE_UNSUPPORTED;
    s.capture = std::make_shared<Capture>();
    captures_of_this_thread()++;
    return SUCCESS;
}

int cuStreamEndCapture(void* stream, void** graph) {
    ENTER();
    auto& s = *static_cast<Stream*>(stream);
    if (!s.capture) return INVALID_VALUE;
    const auto capture = std::move(s.capture);
    s.capture = nullptr;
    captures_of_this_thread()--;
    *graph = nullptr;
    if (capture->spoilt) return CAPTURE_INVALIDATED;
    *graph = make(capture);
    return SUCCESS;
}

int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
    ENTER();
    if (flags != 0) return INVALID_VALUE;
    if (getenv("FAKE_CUDA_NO_GRAPHS")) return OUT_OF_MEMORY;
    *executable = make(static_cast<Graph*>(graph)->nodes);
    counts.captured++;
    return SUCCESS;
}

int cuGraphLaunch(void* executable, void* stream) {
    ENTER();
    auto& s = *static_cast<Stream*>(stream);
    if (s.capture) return device().spoil(s);
    counts.launched++;
    device().enqueue(s, [nodes = static_cast<Graph*>(executable)->nodes] {
        for (auto& node : nodes->nodes) node();
    });
    return SUCCESS;
}

int cuGraphDestroy(void* graph) { return give_back(graph); }
int cuGraphExecDestroy(void* executable) { return give_back(executable); }

}  // extern "C"

namespace {

// Beside what driver.cpp reports.
__attribute__((destructor)) void report() {
    const char* path = getenv("FAKE_CUDA_GRAPH_REPORT");
    FILE* file = path ? fopen(path, "a") : nullptr;
    if (!file) return;
    fprintf(file, "{\"held\":%zu,\"captured\":%zu,\"launched\":%zu}\n", counts.held, counts.captured, counts.launched);
    fclose(file);
}

}  // namespace
