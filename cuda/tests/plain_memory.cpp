// Python module for tests under AddressSanitizer: NumPy keeps small blocks that arrays freed, where
// a use after free would go unseen; after install() all data of arrays comes from malloc alone.
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

#include <cstdlib>

namespace {

void* make(void*, size_t bytes) {
  return std::malloc(bytes);
}
void* make_zeros(void*, size_t count, size_t bytes) {
  return std::calloc(count, bytes);
}
void* resize(void*, void* old, size_t bytes) {
  return std::realloc(old, bytes);
}
void release(void*, void* old, size_t) {
  std::free(old);
}

PyDataMem_Handler handler = {"plain", 1, {nullptr, make, make_zeros, resize, release}};

// Of the thread that calls it.
PyObject* install(PyObject*, PyObject*) {
  PyObject* capsule = PyCapsule_New(&handler, "mem_handler", nullptr);
  PyObject* before = capsule == nullptr ? nullptr : PyDataMem_SetHandler(capsule);
  Py_XDECREF(capsule);
  return before;
}

PyMethodDef methods[] = {{"install", install, METH_NOARGS, nullptr}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "plain_memory", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_plain_memory() {
  import_array();
  return PyModule_Create(&module);
}
