/* hip_version.h - of the HIP that is simulated. */

#ifndef SIM_HIP_VERSION_H
#define SIM_HIP_VERSION_H

#define HIP_VERSION_MAJOR 6
#define HIP_VERSION_MINOR 3

#endif /* SIM_HIP_VERSION_H */
