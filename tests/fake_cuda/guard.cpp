// What a CPU build of PyTorch lacks for tensors whose device is called "cuda": somebody who answers for the device.
// There is one, it is always current and always idle, and it has one stream. Nothing can be computed on it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

struct IdleHooks final : public CUDAHooksInterface {
  explicit IdleHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

// The registry finds hooks by the name of their class.
using CUDAHooks = IdleHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace {

constexpr c10::DeviceType kind = c10::DeviceType::CUDA;
const c10::Device device(kind, 0);
const c10::Stream stream(c10::Stream::DEFAULT, device);

struct IdleGuard final : public c10::impl::NoOpDeviceGuardImpl<kind> {
  c10::Device getDevice() const override { return device; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, IdleGuard)
