// Python face of replica synchronisation on the CPU: items are NumPy arrays of the C structs,
// memory is given by address, and the GIL is released while ranks wait for each other.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "replica_sync/host_context.hpp"

namespace relibra::replica_sync {
namespace {

namespace py = pybind11;

// The structs of an array: one axis, C-contiguous, items of exactly this size.
template <typename T>
const T* structs(const py::array& array, const char* name) {
  const bool contiguous = (array.flags() & py::array::c_style) != 0;
  if (array.ndim() != 1 || !contiguous || array.itemsize() != static_cast<py::ssize_t>(sizeof(T)))
    throw py::type_error(std::string(name) + ": need a C-contiguous array [n] of items of " +
                         std::to_string(sizeof(T)) + " bytes, got " + std::to_string(array.ndim()) +
                         " axes, items of " + std::to_string(array.itemsize()) + " bytes");
  return static_cast<const T*>(array.data());
}

const RsFault* fault_of(const py::array& fault) {
  const auto* one = structs<RsFault>(fault, "fault");
  if (fault.shape(0) != 1)
    throw py::type_error("fault: need 1 item, got " + std::to_string(fault.shape(0)));
  return one;
}

int checked(int code, const char* call) {
  if (code == RS_BAD_ARGUMENT)
    throw py::value_error(std::string(call) +
                          ": need a fault with record, abort and peer_aborts, blocks >= 1, threads "
                          ">= 1, blocks x threads <= 256, arrivals with every full, kind 0..2 and "
                          "grads of every replica; got another value");
  return code;
}

int push(const py::array& items, const py::array& fault, int blocks, int threads) {
  const auto* first = structs<RsPushItem>(items, "items");
  const int n = static_cast<int>(items.shape(0));
  const RsFault* one = fault_of(fault);
  int code;
  {
    py::gil_scoped_release release;
    code = rs_push(first, n, one, blocks, threads, nullptr);
  }
  return checked(code, "push");
}

int wait(const py::array& items, uint64_t use, int op, uint64_t timeout_ns,
         const py::array& fault) {
  const auto* first = structs<RsWaitItem>(items, "items");
  const int n = static_cast<int>(items.shape(0));
  const RsFault* one = fault_of(fault);
  int code;
  {
    py::gil_scoped_release release;
    code = rs_wait(first, n, use, op, timeout_ns, one, nullptr);
  }
  return checked(code, "wait");
}

int publish(const py::array& items, const py::array& fault) {
  const auto* first = structs<RsPublishItem>(items, "items");
  const int n = static_cast<int>(items.shape(0));
  const RsFault* one = fault_of(fault);
  int code;
  {
    py::gil_scoped_release release;
    code = rs_publish(first, n, one, nullptr);
  }
  return checked(code, "publish");
}

int reduce(const py::array& items, const py::array& fault, int blocks, int threads) {
  const auto* first = structs<RsReduceItem>(items, "items");
  const int n = static_cast<int>(items.shape(0));
  const RsFault* one = fault_of(fault);
  int code;
  {
    py::gil_scoped_release release;
    code = rs_reduce(first, n, one, blocks, threads, nullptr);
  }
  return checked(code, "reduce");
}

void report_failure(const py::array& fault, uint32_t code, int op, uint64_t use, int peer, int slot,
                    uint64_t expected, uint64_t observed) {
  if (code == RS_OK || code >= RS_BAD_ARGUMENT)
    throw py::value_error("code: need 1..99, got " + std::to_string(code));
  HostContext context(0, 1, 0, 1, nullptr);
  report(context, *fault_of(fault), op, use, {code, peer, slot, expected, observed});
}

py::array_t<uint64_t> load_words(const py::array& addresses) {
  const auto* from = structs<uint64_t>(addresses, "addresses");
  py::array_t<uint64_t> loaded(addresses.shape(0));
  uint64_t* to = loaded.mutable_data();
  for (py::ssize_t i = 0; i < addresses.shape(0); ++i)
    to[i] = load_acquire(reinterpret_cast<uint64_t*>(from[i]));
  return loaded;
}

uint32_t load_code(uintptr_t record) {
  return load_acquire(&reinterpret_cast<RsErrorRecord*>(record)->code);
}

}  // namespace
}  // namespace relibra::replica_sync

PYBIND11_MODULE(_replica_sync, m) {
  namespace rs = relibra::replica_sync;
  namespace py = pybind11;
  m.def("rs_abi_version", &rs_abi_version);
  m.def("push", &rs::push, py::arg("items"), py::arg("fault"), py::arg("blocks") = 1,
        py::arg("threads") = 1);
  m.def("wait", &rs::wait, py::arg("items"), py::arg("use"), py::arg("op"), py::arg("timeout_ns"),
        py::arg("fault"));
  m.def("publish", &rs::publish, py::arg("items"), py::arg("fault"));
  m.def("reduce", &rs::reduce, py::arg("items"), py::arg("fault"), py::arg("blocks") = 1,
        py::arg("threads") = 1);
  m.def("report", &rs::report_failure, py::arg("fault"), py::arg("code"), py::arg("op"),
        py::arg("use"), py::arg("peer") = -1, py::arg("slot") = -1, py::arg("expected") = 0,
        py::arg("observed") = 0);
  m.def("load_words", &rs::load_words, py::arg("addresses"));
  m.def("load_code", &rs::load_code, py::arg("record"));
}
