// Kernels by name, and their launch from an array of pointers to arguments as the driver takes it.

#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace shim {

struct Kernel {
    std::vector<std::size_t> sizes;
    void (*run)(const void* function, void** arguments);
    const void* function;
};

inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

template <class... A, std::size_t... I>
void call(void (*function)(A...), void** arguments, std::index_sequence<I...>) {
    function(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
}

template <class... A>
void run(const void* function, void** arguments) {
    call(reinterpret_cast<void (*)(A...)>(const_cast<void*>(function)), arguments, std::index_sequence_for<A...>());
}

struct Registered {
    template <class... A>
    Registered(const char* name, void (*function)(A...)) {
        kernels()[name] = Kernel{{sizeof(A)...}, &run<A...>, reinterpret_cast<const void*>(function)};
    }
};

struct Launch {
    const Kernel* kernel;
    void** arguments;
};

inline void run_thread(void* launch) {
    const Launch& l = *static_cast<const Launch*>(launch);
    l.kernel->run(l.kernel->function, l.arguments);
}

}  // namespace shim

#define VISIBLE extern "C" __attribute__((visibility("default")))

// 0: launched and done. 1: there is no such kernel. Whatever else is wrong is printed and ends the process.
VISIBLE int shim_launch(const char* name, const unsigned grid[3], const unsigned block[3], std::size_t shared_bytes, void** arguments) {
    const auto found = shim::kernels().find(name);
    if (found == shim::kernels().end()) return 1;
    std::lock_guard<std::mutex> guard(shim::one_launch);
    shim::g.kernel = found->first.c_str();
    shim::Launch launch{&found->second, arguments};
    shim::run_grid({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, &shim::run_thread, &launch);
    return 0;
}

// The number of a kernel's parameters, -1 if there is no such kernel; up to `max` of their sizes are written.
VISIBLE int shim_params(const char* name, std::size_t sizes[], int max) {
    const auto found = shim::kernels().find(name);
    if (found == shim::kernels().end()) return -1;
    const auto& all = found->second.sizes;
    for (int i = 0; i < max && i < static_cast<int>(all.size()); i++) sizes[i] = all[i];
    return static_cast<int>(all.size());
}

// One of `shim::Schedule`, 0 at first.
VISIBLE void shim_set_schedule(int schedule) { shim::g.schedule = schedule; }
