// NumPy arrays at the border: checked, never converted in silence.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace relibra {

namespace py = pybind11;

inline std::string shape_text(const std::vector<py::ssize_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i)
    text += (i ? ", " : "") + (sizes[i] < 0 ? std::string("?") : std::to_string(sizes[i]));
  return text + "]";
}

// Pointer to the values of a C-contiguous array of exactly this type and shape (-1 = any size).
template <typename T>
const T* values(const py::array& array, const char* name, const std::vector<py::ssize_t>& shape) {
  const std::vector<py::ssize_t> found(array.shape(), array.shape() + array.ndim());
  bool fits = found.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || shape[i] == found[i];
  const bool contiguous = (array.flags() & py::array::c_style) != 0;
  if (!py::isinstance<py::array_t<T>>(array) || !fits || !contiguous) {
    const auto dtype = py::str(py::dtype::of<T>()).cast<std::string>();
    const auto got = py::str(array.dtype()).cast<std::string>();
    throw py::type_error(std::string(name) + ": need a C-contiguous array " + dtype + " " +
                         shape_text(shape) + ", got " + got + " " + shape_text(found));
  }
  return static_cast<const T*>(array.data());
}

// Refuses values outside low..high; names the first.
template <typename T>
void check_range(const char* name, const T* entries, int64_t count, int64_t low, int64_t high) {
  for (int64_t i = 0; i < count; ++i)
    if (entries[i] < low || entries[i] > high)
      throw py::value_error(std::string(name) + ": need values in " + std::to_string(low) + ".." +
                            std::to_string(high) + ", got " + std::to_string(entries[i]));
}

template <typename T>
py::array_t<T> empty(const std::vector<py::ssize_t>& shape) {
  return py::array_t<T>(shape);
}

}  // namespace relibra
