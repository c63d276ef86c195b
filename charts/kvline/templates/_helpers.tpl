{{/* The operator's permissions in the namespaces that it reconciles. No secrets, logs or exec. tests/integration/test_rights.py checks that each one is used. */}}
{{- define "kvline.rules" -}}
- apiGroups: [serving.kvline.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [kvline.dev] # the kind's earlier group, to say that its services are not reconciled
  resources: [inferenceservices]
  verbs: [list]
- apiGroups: [serving.kvline.dev]
  resources: [inferenceservices/status, inferenceservices/scale] # scale: with spec.autoscaling
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, create, delete]
- apiGroups: [resource.k8s.io] # only for services with gpuDeviceClass
  resources: [resourceclaimtemplates]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [rbac.authorization.k8s.io] # which release has a namespace
  resources: [rolebindings]
  resourceNames: [kvline-operator]
  verbs: [get]
{{- end }}
{{- define "kvline.image" -}}
{{- if and (not .allowTags) .image (not (contains "@sha256:" .image)) }}
{{- fail (printf "image.%s must be name@sha256:<64 hex>, got %s; image.allowTags is for development" .name .image) }}
{{- end }}
{{- .image }}
{{- end }}
