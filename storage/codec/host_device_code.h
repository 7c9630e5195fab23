#pragma once

// KV_HOST_DEVICE marks functions that a device runs too: plain C++17, without allocation, I/O or
// library calls whose rounding differs between processor and device. KV_DEVICE_CODE marks those
// that are a device's alone where a device's compiler reads them, and plain functions elsewhere.
#ifdef __CUDACC__
#define KV_HOST_DEVICE __host__ __device__
#define KV_DEVICE_CODE __device__
#else
#define KV_HOST_DEVICE
#define KV_DEVICE_CODE
#endif
