// libcuda for tests: the part of the driver that Baton calls, on the device of device.h.
//
// FAKE_CUDA_REPORT    a file to which the process appends, at its end, what it did and what it did not give back
// FAKE_CUDA_DROP_WAITS=1   streams wait for no event: the fault that a test plants
// FAKE_CUDA_DROP_SYNCS=N   after N waits, threads wait no more for events that they would sleep for (CU_EVENT_BLOCKING_SYNC): another one
// FAKE_CUDA_MEMORY    bytes that the device has, 2 GiB if not given
// Kernels are those of libbaton_kernels.so in this library's own folder.

#include "device.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace fake {

Device& device() {
    static Device* the = new Device;  // never gone: threads may outlive statics
    return *the;
}

static size_t page_up(size_t len) { return (len + 4095) / 4096 * 4096; }

static void protect(Device& d, int how) {
    for (auto& [base, len] : d.memory) mprotect(reinterpret_cast<void*>(base), page_up(len), how);
}

bool Device::owns(uintptr_t address, size_t len) const {
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return false;
    auto& [base, size] = *std::prev(after);
    return address - base <= size && len <= size - (address - base);
}

int Device::spoil(Stream& stream) {
    stream.capture->spoilt = true;
    return CAPTURE_UNSUPPORTED;
}

void Device::enqueue(Stream& stream, std::function<void()> work) {
    if (stream.capture) {
        stream.capture->nodes.push_back(std::move(work));
        return;
    }
    stream.queue.push_back(std::move(work));
    stream.queued++;
}

void Device::run(Stream& stream, uint64_t until) {
    if (running++ == 0) protect(*this, PROT_READ | PROT_WRITE);
    while (stream.done < until && !stream.queue.empty()) {
        auto work = std::move(stream.queue.front());
        stream.queue.pop_front();
        work();
        stream.done++;
    }
    if (--running == 0) protect(*this, PROT_NONE);
}

static size_t total_bytes() {
    const char* text = getenv("FAKE_CUDA_MEMORY");
    return text ? strtoull(text, nullptr, 10) : size_t(2) << 30;
}

static thread_local bool context_is_current = false;
static thread_local size_t captures = 0;

bool has_context() { return context_is_current; }
size_t& captures_of_this_thread() { return captures; }

struct Function {
    std::string name;
    std::vector<size_t> sizes;
};

struct Module {
    std::map<std::string, Function*> functions;
};

// An argument of a captured kernel whose memory stays what it is when the kernel first runs: see fake_freeze.
struct Frozen {
    int argument = -1;
    std::shared_ptr<std::vector<char>> bytes;

    void keep(const Device& d, std::vector<std::vector<char>>& arguments) {
        if (argument < 0 || bytes) return;
        uintptr_t at;
        memcpy(&at, arguments[argument].data(), sizeof at);
        // Up to the end of the allocation, since nobody tells how much the kernel reads.
        const auto& [base, len] = *std::prev(d.memory.upper_bound(at));
        const char* from = reinterpret_cast<const char*>(at);
        bytes = std::make_shared<std::vector<char>>(from, from + (base + len - at));
        const char* kept = bytes->data();
        memcpy(arguments[argument].data(), &kept, sizeof kept);
    }
};

using Launch = int (*)(const char*, const unsigned*, const unsigned*, size_t, void**);
using Params = int (*)(const char*, size_t*, int);

struct Kernels {
    Launch launch = nullptr;
    Params params = nullptr;
    Kernels() {
        Dl_info self;
        if (!dladdr(reinterpret_cast<void*>(&device), &self)) return;
        std::string folder = self.dli_fname;
        folder = folder.substr(0, folder.rfind('/') + 1);
        void* library = dlopen((folder + "libbaton_kernels.so").c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "fake CUDA: %s\n", dlerror());
            return;
        }
        launch = reinterpret_cast<Launch>(dlsym(library, "shim_launch"));
        params = reinterpret_cast<Params>(dlsym(library, "shim_params"));
    }
};

static Kernels& kernels() {
    static Kernels all;
    return all;
}

__attribute__((destructor)) static void report() {
    const char* path = getenv("FAKE_CUDA_REPORT");
    if (!path) return;
    const Counts& c = device().counts;
    FILE* file = fopen(path, "a");
    if (!file) return;
    fprintf(file,
            "{\"pid\":%d,\"allocations\":%zu,\"device_bytes\":%zu,\"pinned\":%zu,\"streams\":%zu,\"events\":%zu,\"modules\":%zu,\"contexts\":%zu,"
            "\"blas\":%zu,\"launches\":%zu,\"products\":%zu,\"copies\":%zu,\"dropped_waits\":%zu,\"dropped_syncs\":%zu,\"opens\":%zu,\"exports\":%zu}\n",
            int(getpid()), c.allocations, c.device_bytes, c.pinned, c.streams, c.events, c.modules, c.contexts, c.blas, c.launches, c.products, c.copies,
            c.dropped_waits, c.dropped_syncs, c.opens, c.exports);
    fclose(file);
}

}  // namespace fake

using namespace fake;
using Guard = std::lock_guard<std::recursive_mutex>;

#define ENTER()                              \
    Device& d = device();                    \
    Guard guard(d.lock);                     \
    if (!has_context()) return INVALID_CONTEXT

// For what would wait for the device, or stop it: a thread that captures must not.
#define ENTER_BETWEEN_CAPTURES() \
    ENTER();                     \
    if (captures_of_this_thread() > 0) return CAPTURE_UNSUPPORTED

extern "C" {

int fake_enqueue(void* stream, void (*work)(void*), void* argument, void (*release)(void*)) {
    const std::shared_ptr<void> owned(argument, release);
    ENTER();
    d.enqueue(*static_cast<Stream*>(stream), [work, owned] { work(owned.get()); });
    return SUCCESS;
}

int fake_owns(uint64_t address, size_t len) {
    Device& d = device();
    Guard guard(d.lock);
    return d.owns(address, len);
}

// What was not given back: allocations, pinned memory, streams, events, modules, contexts, objects of cuBLASLt. Then launches and products.
void fake_counts(size_t out[9]) {
    Guard guard(device().lock);
    const Counts& c = device().counts;
    const size_t all[9] = {c.allocations, c.pinned, c.streams, c.events, c.modules, c.contexts, c.blas, c.launches, c.products};
    memcpy(out, all, sizeof all);
}

void fake_count(int products, int handles) {
    Device& d = device();
    Guard guard(d.lock);
    d.counts.products += products;
    d.counts.blas += handles;
}

int cuInit(unsigned) { return SUCCESS; }

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorName(int error, const char** text) {
    *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return SUCCESS;
}

int cuGetErrorString(int error, const char** text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_CONTEXT ? "no context is current" : error == NOT_FOUND ? "not found" : error == NO_PEER_ACCESS ? "peer access is not possible" : error == INVALID_HANDLE ? "the handle is none" : "fake CUDA refuses";
    return SUCCESS;
}

int cuDeviceGetCount(int* count) {
    *count = 2;
    return SUCCESS;
}

int cuDeviceGet(int* handle, int ordinal) {
    *handle = ordinal;
    return ordinal < 2 && ordinal >= 0 ? SUCCESS : NO_DEVICE;
}

int cuDeviceGetName(char* name, int len, int) {
    snprintf(name, len, "fake device");
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = total_bytes();
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : 0;  // compute capability 9.0
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** context, int ordinal) {
    Guard guard(device().lock);
    *context = reinterpret_cast<void*>(uintptr_t(ordinal + 1));
    device().counts.contexts++;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    Guard guard(device().lock);
    device().counts.contexts--;
    return SUCCESS;
}

int cuCtxSetCurrent(void* context) {
    context_is_current = context != nullptr;
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER();
    *total = total_bytes();
    *free = *total - d.counts.device_bytes;
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t* address, size_t len) {
    ENTER_BETWEEN_CAPTURES();
    if (len == 0) return INVALID_VALUE;
    if (len > total_bytes() - d.counts.device_bytes) return OUT_OF_MEMORY;
    void* base = d.take(len);
    if (!base) return OUT_OF_MEMORY;
    memset(base, 0xff, len);  // NaN in every type
    if (d.running == 0) mprotect(base, page_up(len), PROT_NONE);
    *address = reinterpret_cast<uint64_t>(base);
    d.memory[*address] = len;
    d.counts.allocations++;
    d.counts.device_bytes += len;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    ENTER_BETWEEN_CAPTURES();
    auto found = d.memory.find(address);
    if (found == d.memory.end() || !d.files.count(address)) return INVALID_VALUE;
    d.give_back(address, found->second);
    d.counts.allocations--;
    d.counts.device_bytes -= found->second;
    d.memory.erase(found);
    return SUCCESS;
}

int cuMemHostAlloc(void** bytes, size_t len, unsigned) {
    ENTER_BETWEEN_CAPTURES();
    *bytes = malloc(len);
    d.pinned[reinterpret_cast<uintptr_t>(*bytes)] = len;
    d.counts.pinned++;
    return SUCCESS;
}

int cuMemFreeHost(void* bytes) {
    ENTER_BETWEEN_CAPTURES();
    if (!d.pinned.erase(reinterpret_cast<uintptr_t>(bytes))) return INVALID_VALUE;
    free(bytes);
    d.counts.pinned--;
    return SUCCESS;
}

int cuStreamCreate(void** stream, unsigned) {
    ENTER();
    *stream = new Stream;
    d.counts.streams++;
    return SUCCESS;
}

// Streams and events stay until the process ends: work queued elsewhere may name them.
int cuStreamDestroy_v2(void* stream) {
    ENTER();
    auto& s = *static_cast<Stream*>(stream);
    d.run(s, s.queued);
    d.counts.streams--;
    return SUCCESS;
}

int cuStreamSynchronize(void* stream) {
    ENTER_BETWEEN_CAPTURES();
    auto& s = *static_cast<Stream*>(stream);
    d.run(s, s.queued);
    return SUCCESS;
}

int cuEventCreate(void** event, unsigned flags) {
    ENTER();
    *event = new Event{nullptr, 0, (flags & 1) != 0};
    d.counts.events++;
    return SUCCESS;
}

int cuEventDestroy_v2(void*) {
    ENTER();
    d.counts.events--;
    return SUCCESS;
}

int cuEventRecord(void* event, void* stream) {
    ENTER();
    auto& s = *static_cast<Stream*>(stream);
    if (s.capture) return d.spoil(s);
    auto& e = *static_cast<Event*>(event);
    e = Event{&s, s.queued, e.blocking};
    return SUCCESS;
}

int cuEventSynchronize(void* event) {
    ENTER_BETWEEN_CAPTURES();
    const Event e = *static_cast<Event*>(event);
    const char* drop = getenv("FAKE_CUDA_DROP_SYNCS");
    if (e.blocking && drop && d.counts.syncs++ >= strtoull(drop, nullptr, 10)) {
        d.counts.dropped_syncs++;
        return SUCCESS;
    }
    if (e.stream) d.run(*e.stream, e.at);
    return SUCCESS;
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    ENTER();
    const Event e = *static_cast<Event*>(event);
    if (auto& s = *static_cast<Stream*>(stream); s.capture) {
        d.spoil(s);
        return CAPTURE_ISOLATION;
    }
    if (getenv("FAKE_CUDA_DROP_WAITS")) {
        d.counts.dropped_waits++;
        return SUCCESS;
    }
    if (e.stream) d.enqueue(*static_cast<Stream*>(stream), [&d, e] { d.run(*e.stream, e.at); });
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t len, void* stream) {
    ENTER();
    if (!d.owns(to, len) || d.owns(reinterpret_cast<uintptr_t>(from), 1)) return INVALID_VALUE;
    d.counts.copies++;
    d.enqueue(*static_cast<Stream*>(stream), [=] { memcpy(reinterpret_cast<void*>(to), from, len); });
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t len, void* stream) {
    ENTER();
    if (!d.owns(from, len) || d.owns(reinterpret_cast<uintptr_t>(to), 1)) return INVALID_VALUE;
    d.counts.copies++;
    d.enqueue(*static_cast<Stream*>(stream), [=] { memcpy(to, reinterpret_cast<void*>(from), len); });
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t len, void* stream) {
    ENTER();
    if (!d.owns(from, len) || !d.owns(to, len)) return INVALID_VALUE;
    d.counts.copies++;
    d.enqueue(*static_cast<Stream*>(stream), [=] { memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), len); });
    return SUCCESS;
}

struct Copy2D {
    size_t src_x, src_y;
    int src_type;
    const void* src_host;
    uint64_t src_device;
    void* src_array;
    size_t src_pitch, dst_x, dst_y;
    int dst_type;
    void* dst_host;
    uint64_t dst_device;
    void* dst_array;
    size_t dst_pitch, width, height;
};

int cuMemcpy2DAsync_v2(const Copy2D* asked, void* stream) {
    ENTER();
    const Copy2D c = *asked;
    constexpr int HOST = 1, DEVICE = 2;
    auto reach = [&](size_t pitch) { return c.height == 0 ? 0 : (c.height - 1) * pitch + c.width; };
    if (c.src_x || c.src_y || c.dst_x || c.dst_y || c.src_pitch < c.width || c.dst_pitch < c.width) return INVALID_VALUE;
    if (!(c.src_type == HOST && c.dst_type == DEVICE) && !(c.src_type == DEVICE && c.dst_type == HOST)) return INVALID_VALUE;
    if (c.src_type == DEVICE ? !d.owns(c.src_device, reach(c.src_pitch)) : !d.owns(c.dst_device, reach(c.dst_pitch))) return INVALID_VALUE;
    d.counts.copies++;
    d.enqueue(*static_cast<Stream*>(stream), [c] {
        const char* from = c.src_type == HOST ? static_cast<const char*>(c.src_host) : reinterpret_cast<const char*>(c.src_device);
        char* to = c.dst_type == HOST ? static_cast<char*>(c.dst_host) : reinterpret_cast<char*>(c.dst_device);
        for (size_t row = 0; row < c.height; row++) memcpy(to + row * c.dst_pitch, from + row * c.src_pitch, c.width);
    });
    return SUCCESS;
}

int cuModuleLoadData(void** module, const void* image) {
    ENTER_BETWEEN_CAPTURES();
    const unsigned char fatbin[4] = {0x50, 0xed, 0x55, 0xba};
    if (memcmp(image, fatbin, 4) != 0 || !kernels().launch || !kernels().params) return INVALID_IMAGE;
    *module = new Module;
    d.counts.modules++;
    return SUCCESS;
}

int cuModuleUnload(void* module) {
    ENTER();
    for (auto& [name, function] : static_cast<Module*>(module)->functions) delete function;
    delete static_cast<Module*>(module);
    d.counts.modules--;
    return SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    ENTER();
    size_t sizes[64];
    const int num = kernels().params(name, sizes, 64);
    if (num < 0) return NOT_FOUND;
    auto& known = static_cast<Module*>(module)->functions[name];
    if (!known) known = new Function{name, std::vector<size_t>(sizes, sizes + num)};
    *function = known;
    return SUCCESS;
}

int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream, void** args, void**) {
    ENTER();
    const Function& f = *static_cast<Function*>(function);
    if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || bx * by * bz > 1024) return INVALID_VALUE;
    // Arguments are copied now, as the driver does; what they point to is looked at when the kernel runs.
    std::vector<std::vector<char>> copies;
    for (size_t i = 0; i < f.sizes.size(); i++) {
        if (!args[i]) return INVALID_VALUE;
        const char* from = static_cast<const char*>(args[i]);
        copies.emplace_back(from, from + f.sizes[i]);
    }
    d.counts.launches++;
    auto& s = *static_cast<Stream*>(stream);
    Frozen frozen;
    if (s.capture && !d.frozen_kernel.empty() && f.name.rfind(d.frozen_kernel, 0) == 0) frozen.argument = d.frozen_argument;
    d.enqueue(s, [&d, name = f.name, copies = std::move(copies), frozen, gx, gy, gz, bx, by, bz, shared]() mutable {
        frozen.keep(d, copies);
        const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
        std::vector<void*> pointers;
        for (auto& copy : copies) pointers.push_back(copy.data());
        if (kernels().launch(name.c_str(), grid, block, shared, pointers.data()) != 0) {
            fprintf(stderr, "fake CUDA: kernel %s vanished\n", name.c_str());
            abort();
        }
    });
    return SUCCESS;
}

}  // extern "C"
