// Device memory that another process opens (CUDA IPC). All memory of the device is a file without a name in a file system; a handle says whose descriptor it is.
//
// FAKE_CUDA_NO_PEER=1   no handle can be opened, as between cards that can't reach each other
// A process can't open its own handles, as on a real driver, before it has called `fake_open_own`: for tests with both ends in one process.

#include "device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

static bool opens_own = false;

static size_t page_up(size_t len) { return (len + 4095) / 4096 * 4096; }

// Names in /proc/<pid>/maps say who made what: tests look there for what a process still has open.
static void name_of(char (&out)[64], int pid, uint64_t serial) { snprintf(out, sizeof out, "fake-cuda-%d-%llu", pid, (unsigned long long)serial); }

void* Device::take(size_t len) {
    char name[64];
    name_of(name, getpid(), ++serial);
    const int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, page_up(len)) != 0) return nullptr;
    void* base = mmap(nullptr, page_up(len), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) {
        close(file);
        return nullptr;
    }
    files[reinterpret_cast<uintptr_t>(base)] = Backing{file, serial};
    return base;
}

void Device::give_back(uintptr_t base, size_t len) {
    munmap(reinterpret_cast<void*>(base), page_up(len));
    auto found = files.find(base);
    close(found->second.file);
    files.erase(found);
}

// What stands in the 64 bytes of a handle.
struct Handle {
    char magic[8];
    int32_t pid, file;
    uint64_t serial, len;
    char rest[32];
};
static_assert(sizeof(Handle) == 64, "as the driver's");

}  // namespace fake

using namespace fake;
using Guard = std::lock_guard<std::recursive_mutex>;

extern "C" {

int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
    Device& d = device();
    Guard guard(d.lock);
    auto found = d.memory.find(address);
    if (!has_context()) return INVALID_CONTEXT;
    if (found == d.memory.end() || !d.files.count(address)) return INVALID_VALUE;
    const Backing& backing = d.files[address];
    *handle = Handle{};
    memcpy(handle->magic, "fakeipc", 8);
    handle->pid = getpid();
    handle->file = backing.file;
    handle->serial = backing.serial;
    handle->len = found->second;
    d.counts.exports++;
    return SUCCESS;
}

int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
    Device& d = device();
    Guard guard(d.lock);
    if (!has_context()) return INVALID_CONTEXT;
    if (captures_of_this_thread() > 0) return CAPTURE_UNSUPPORTED;
    if (flags != 1 || memcmp(handle.magic, "fakeipc", 8) != 0) return INVALID_VALUE;
    if (handle.pid == getpid() && !opens_own) return INVALID_CONTEXT;
    if (getenv("FAKE_CUDA_NO_PEER")) return NO_PEER_ACCESS;
    for (auto& [base, opened] : d.opened) {
        if (opened.pid == handle.pid && opened.serial == handle.serial) {
            opened.times++;
            *address = base;
            d.counts.opens++;
            return SUCCESS;
        }
    }
    char path[64], name[64], link[128] = {};
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
    name_of(name, handle.pid, handle.serial);
    const ssize_t len = readlink(path, link, sizeof link - 1);
    const size_t begins = strlen("/memfd:"), named = strlen(name);
    // The descriptor's number may have been given to another file: then the memory was freed.
    if (len < 0 || strncmp(link, "/memfd:", begins) != 0 || strncmp(link + begins, name, named) != 0 || link[begins + named] != ' ') return INVALID_HANDLE;
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_HANDLE;
    struct stat found;
    void* base = MAP_FAILED;
    if (fstat(file, &found) == 0 && size_t(found.st_size) == page_up(handle.len)) {
        base = mmap(nullptr, page_up(handle.len), d.running ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED, file, 0);
    }
    close(file);
    if (base == MAP_FAILED) return INVALID_HANDLE;
    *address = reinterpret_cast<uint64_t>(base);
    d.opened[*address] = Opened{handle.pid, handle.serial, 1};
    d.memory[*address] = handle.len;
    d.counts.opens++;
    return SUCCESS;
}

int cuIpcCloseMemHandle(uint64_t address) {
    Device& d = device();
    Guard guard(d.lock);
    if (!has_context()) return INVALID_CONTEXT;
    if (captures_of_this_thread() > 0) return CAPTURE_UNSUPPORTED;
    auto found = d.opened.find(address);
    if (found == d.opened.end()) return INVALID_VALUE;
    d.counts.opens--;
    if (--found->second.times > 0) return SUCCESS;
    munmap(reinterpret_cast<void*>(address), page_up(d.memory[address]));
    d.memory.erase(address);
    d.opened.erase(found);
    return SUCCESS;
}

int cuMemGetAddressRange_v2(uint64_t* base, size_t* len, uint64_t address) {
    Device& d = device();
    Guard guard(d.lock);
    if (!has_context()) return INVALID_CONTEXT;
    auto after = d.memory.upper_bound(address);
    if (after == d.memory.begin()) return INVALID_VALUE;
    auto& [first, size] = *std::prev(after);
    if (address - first >= size) return INVALID_VALUE;
    if (base) *base = first;
    if (len) *len = size;
    return SUCCESS;
}

void fake_open_own() {
    Guard guard(device().lock);
    opens_own = true;
}

// Handles open now; handles given out since the process began.
void fake_ipc_counts(size_t out[2]) {
    Guard guard(device().lock);
    out[0] = device().counts.opens;
    out[1] = device().counts.exports;
}

}  // extern "C"
